"""Recurrent layers: gated delta nets, state spaces and short convolutions, one op each between their projections."""
