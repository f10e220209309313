"""What chains of convolutions are made of, and what they compute in plain torch."""
