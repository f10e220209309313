"""Layers of PyTorch Geometric."""
