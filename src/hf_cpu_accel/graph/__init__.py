"""Graph neural networks: the adjacency that layers share, and what serves the message passing of PyTorch Geometric."""

from hf_cpu_accel.graph.layerwise import inference

__all__ = ["inference"]
