"""Layers with recurrence: gated delta nets, state spaces and short convolutions, between their projections in one op each."""
