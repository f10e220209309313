"""`hf-cpu-accel supports`: find out from the config of a model which of its layers run fused."""
