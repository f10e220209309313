"""`nn.MultiheadAttention`, torch's own: packed projections around our attention."""
