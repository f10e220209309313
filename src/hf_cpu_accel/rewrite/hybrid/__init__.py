"""Hybrids' steps of decoding: layers with a recurrence join those that attend in one call of `decoder_layers`."""
