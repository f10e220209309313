"""Transposed convolutions: 1-d ones as products of overlapping rows, and 2-d ones as convolutions."""
