"""Attention of recorded layers as one step, as they write it out or have torch compute it."""
