"""Layers that are fused around what they have in the place of attention."""
