"""Random calls of every op, good and bad: `python -m tests.ops.fuzz`, see __main__.py.

One file per family of ops makes good calls (call.py); spoil.py breaks them; judge.py says what an op may do with either.
"""
