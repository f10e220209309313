"""Decode steps without the Python of the model: its ops are captured in a few steps and replayed in later ones."""
