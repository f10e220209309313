"""The ops behind everything: `torch.ops.hf_cpu_accel.*`. One file per family: function, reference, fake kernel.

All families are declared as soon as one is imported, so that every op exists, with the C++ library or without.
"""

from hf_cpu_accel.ops import (
    attention,
    convolution,
    convolution_chain,
    decoder,
    embedding,
    encoder_layer,
    experts,
    ffn,
    graph_attention,
    group_norm,
    linear,
    messages,
    norm,
    paged_attention,
    quantize,
    recurrent,
    rope,
    segment_matmul,
    snake,
    sparse,
    sparse_gradients,
    values,
)

__all__ = [
    "attention",
    "convolution",
    "convolution_chain",
    "decoder",
    "embedding",
    "encoder_layer",
    "experts",
    "ffn",
    "graph_attention",
    "group_norm",
    "linear",
    "messages",
    "norm",
    "paged_attention",
    "quantize",
    "recurrent",
    "rope",
    "segment_matmul",
    "snake",
    "sparse",
    "sparse_gradients",
    "values",
]
