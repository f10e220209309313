"""Record the calls of PyTorch and of ops of this package in one call of a layer, as a program that later calls run."""
