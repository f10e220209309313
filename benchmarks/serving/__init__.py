"""Servers and their parts under load."""
