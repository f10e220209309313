"""Packing of weights into the order in which the kernels read them."""

from hf_cpu_accel.packing.linear import PackedWeight, concat, pack_linear, unpack_linear

__all__ = ["PackedWeight", "concat", "pack_linear", "unpack_linear"]
