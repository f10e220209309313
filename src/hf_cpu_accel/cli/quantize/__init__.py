"""`hf-cpu-accel quantize`: measure the loss of each linear in fewer bits, propose mixed dtypes, and write the packed folder."""
