"""Models that turn texts into rows of numbers, each row for one text, computed in batches of what many clients ask."""
