"""Soak test: tiny models under many clients, lengths and dtypes, without a wrong output, an error or a memory leak."""
