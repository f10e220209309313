"""`hf-cpu-accel bench`: compare PyTorch (eager) with accelerated copies of a model. Other commands share its parts."""
