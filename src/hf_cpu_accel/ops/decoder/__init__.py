"""`decoder_layers`: the op, the classes that describe a layer, and the reference."""

from hf_cpu_accel.ops.decoder import layers

__all__ = ["layers"]
