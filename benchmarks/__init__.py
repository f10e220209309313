"""The project's benchmark harness; see docs/how-to/benchmarking.md. Not part of the installed package."""
