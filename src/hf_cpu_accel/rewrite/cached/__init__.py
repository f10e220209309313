"""Attention with a cache of keys and values, in layers that the op for decoder layers does not know."""
