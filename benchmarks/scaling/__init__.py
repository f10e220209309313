"""Speedups of two ranks, processes over a graph, or replicas over one, and a model of many sockets."""
