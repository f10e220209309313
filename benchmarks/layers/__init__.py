"""Whole layers beside what they are made of."""
