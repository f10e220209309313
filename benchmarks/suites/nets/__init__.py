"""Networks of the suites that transformers has not: their published architectures, written short, with random weights."""
