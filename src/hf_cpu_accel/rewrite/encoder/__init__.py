"""Encoder layers, with and without windows, and embeddings."""
