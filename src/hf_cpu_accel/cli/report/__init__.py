"""`hf-cpu-accel report`: write an HTML page about one model on this machine."""
