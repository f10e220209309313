"""Rivals in environments of their own, beside the project's systems in one table; see benchmarks/README.md."""
