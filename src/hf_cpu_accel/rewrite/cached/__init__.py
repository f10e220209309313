"""Attention with a KV cache, in layers that the op for decoder layers does not support."""
