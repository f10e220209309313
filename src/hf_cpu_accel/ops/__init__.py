"""The ops behind everything: `torch.ops.hf_cpu_accel.*`. One file per family: function, reference, fake kernel.

All families are declared as soon as one is imported, so that every op exists, with the C++ library or without.
"""

from hf_cpu_accel.ops import attention, embedding, encoder_layer, ffn, linear, norm

__all__ = ["attention", "embedding", "encoder_layer", "ffn", "linear", "norm"]
