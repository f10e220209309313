"""Decode steps without the Python of the model: the ops that it calls are captured in a few steps, and replayed from then on."""
