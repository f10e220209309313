"""Transposed convolutions: as products of rows that overlap in time, and as convolutions of images."""
