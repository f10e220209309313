"""`hf-cpu-accel report`: one page about one model on this machine."""
