"""Decoder layers, and the stacks that they make."""
