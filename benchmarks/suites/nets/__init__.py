"""Networks of the suites that transformers does not have: the published architectures, written short, with random weights."""
