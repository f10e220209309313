"""Text generation: the key and value cache, and the decode loop behind `model.generate`."""
