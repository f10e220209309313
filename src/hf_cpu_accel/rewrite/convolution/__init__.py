"""Convolutions, residual blocks and ConvNeXt's blocks."""
