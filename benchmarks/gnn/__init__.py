"""Layers and models of graphs against PyTorch Geometric: `python -m benchmarks.gnn`."""
