"""Detect changes of what a captured layer depends on: the state of its modules (`guard.py`), and the values of tensors
(`values.py`)."""
