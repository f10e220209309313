"""The ops `torch.ops.hf_cpu_accel.*`. One file per family: function, reference, fake kernel.

Importing one family declares all of them, so every op exists, with or without the C++ library.
"""

from hf_cpu_accel.ops import (
    attention,
    convolution,
    convolution_chain,
    decoder,
    deformable_attention,
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
)

__all__ = [
    "attention",
    "convolution",
    "convolution_chain",
    "decoder",
    "deformable_attention",
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
]
