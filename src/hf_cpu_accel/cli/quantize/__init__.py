"""`hf-cpu-accel quantize`: what each linear loses by fewer bits, mixes of them, and the packed folder."""
