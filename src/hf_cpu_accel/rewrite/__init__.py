"""Rewrites of a model's modules: a room for each kind, `registry.py` orders their rules, `apply.py` applies them."""
