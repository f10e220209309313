"""Graph neural networks: the adjacency that layers share, and what serves the message passing of PyTorch Geometric."""
