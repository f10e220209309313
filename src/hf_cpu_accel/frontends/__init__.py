"""Interfaces besides `accelerate_for_cpu`: the keyword `cpu_optimize=`, and classes like those of optimum."""
