"""Recorded results: a data file per machine, and the pages, the README's table and the charts generated from them."""
