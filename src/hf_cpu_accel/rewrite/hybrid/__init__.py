"""Decode steps of hybrids: recurrent layers join layers with attention in one call of `decoder_layers`."""
