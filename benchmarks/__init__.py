"""The project's benchmark harness; see docs/benchmarking.md. Not part of the installed package."""
