"""Text generation: the KV cache, and the decode loop behind `model.generate`."""
