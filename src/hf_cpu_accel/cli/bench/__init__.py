"""`hf-cpu-accel bench`: eager against accelerated copies of a model, and what other commands share of that."""
