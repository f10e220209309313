"""Models that a tool of torch's has quantised: modules over quantised tensors, and exported graphs."""
