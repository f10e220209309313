"""Layers of unknown form: record the calls of torch and of ops of this package in one call, as a list of steps that later calls
run."""
