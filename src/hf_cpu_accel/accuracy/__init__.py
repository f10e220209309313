"""Choose dtypes for an accuracy: the examples, the measurement, and the search for the fastest dtypes that reach it."""
