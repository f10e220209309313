"""Tensors whose values are computed when they are read, and a cache of values derived from tensors."""
