"""Tensors whose values are made when they are read, and what is remembered about a tensor."""
