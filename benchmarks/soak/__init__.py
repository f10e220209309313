"""Tiny models under many clients, lengths and dtypes for a long time: no wrong answer, no error, no memory lost."""
