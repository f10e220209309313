"""What chains of convolutions are made of, how several become one, and what they compute in plain torch."""
