"""Linear layers against other providers: `python -m benchmarks.linear`; with few rows: `python -m benchmarks.linear.decode`."""
