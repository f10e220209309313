"""`decoder_layers`: the op, the values that bind a layer to it, and its reference."""

from hf_cpu_accel.ops.decoder import layers

__all__ = ["layers"]
