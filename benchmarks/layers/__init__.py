"""Layers as one operator, compared with their parts."""
