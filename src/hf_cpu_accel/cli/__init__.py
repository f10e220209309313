"""The command line tool ``hf-cpu-accel``: ``main`` gathers the commands, one file per command."""
