"""`hf-cpu-accel supports`: what of a model would run fused, told from its config alone."""
