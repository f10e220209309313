"""Attention of recorded layers as one step, whether written out or computed by torch."""
