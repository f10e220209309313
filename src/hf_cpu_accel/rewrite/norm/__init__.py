"""Norms, and group norms."""
