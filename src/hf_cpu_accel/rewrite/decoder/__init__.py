"""Decoder layers, and stacks of them."""
