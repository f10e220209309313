"""Encoders: models that return one row of numbers per text, computed in batches of the requests of many clients."""
