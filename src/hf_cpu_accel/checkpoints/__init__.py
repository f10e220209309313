"""Quantized weights as other tools store them, read into affine groups (packing/affine.py) without rounding."""
