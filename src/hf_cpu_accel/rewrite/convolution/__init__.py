"""Convolutions, residual blocks and ConvNeXt blocks."""
