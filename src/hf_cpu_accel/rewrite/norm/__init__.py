"""Norms, and batch norms that join their convolution."""
