"""Models that torch's tools have quantized: modules over quantized tensors, and exported graphs."""
