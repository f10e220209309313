"""Rounding weights for examples: forwards of the original model, linear by linear, and what each is rounded to."""
