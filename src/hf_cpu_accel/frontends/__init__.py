"""One file per host library. Each says which modules of a target to accelerate, and is imported only with its host."""
