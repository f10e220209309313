"""Layers of no known form: what one call of them asks torch and our ops for, as a list of steps that is run from then on."""
