"""Models that a tool of torch's has quantized: modules over quantized tensors, and exported graphs."""
