"""What systems that write text reach, side by side: `python -m benchmarks.generation`."""
