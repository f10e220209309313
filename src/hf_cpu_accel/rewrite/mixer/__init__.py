"""Layers that are fused around a fused mixer: attention or a recurrence."""
