"""Dtypes by a budget of accuracy: examples, what is measured on them, and the search for the fastest dtypes that hold it."""
