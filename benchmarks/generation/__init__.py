"""Text generation by this package and its rivals, side by side: `python -m benchmarks.generation`."""
