"""Linears, containers around them, and feed-forward networks."""
