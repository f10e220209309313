"""Chains of convolutions: their steps, how to join several, and the reference in plain torch."""
