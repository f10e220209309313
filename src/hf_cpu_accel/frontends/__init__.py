"""How users reach us besides `accelerate_for_cpu`: the keyword `cpu_optimize=`, and Optimum-style classes."""
