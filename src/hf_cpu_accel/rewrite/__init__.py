"""Rewrites of a model's modules: one rule family per file, `registry.py` orders them, `apply.py` applies them."""
