"""The calls of a layer that the kernels support. All others run the layer's own `propagate`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn.conv import MessagePassing

from hf_cpu_accel.ops.derivatives import in_forward_mode, in_transform

INDEX_DTYPES = (torch.int64, torch.int32)
_HOOKS = (
    "_propagate_forward_pre_hooks",
    "_propagate_forward_hooks",
    "_message_forward_pre_hooks",
    "_message_forward_hooks",
    "_aggregate_forward_pre_hooks",
    "_aggregate_forward_hooks",
    "_edge_update_forward_pre_hooks",
    "_edge_update_forward_hooks",
)


def takes(conv: MessagePassing, edge_index: object) -> bool:
    """Return whether the kernels support this call: dense CPU edges, no hooks, no explanation, and no forward-mode derivative."""
    return (
        isinstance(edge_index, Tensor)
        and edge_index.layout is torch.strided
        and edge_index.dtype in INDEX_DTYPES
        and edge_index.dim() == 2
        and edge_index.shape[0] == 2
        and edge_index.device.type == "cpu"
        and not conv.explain
        and conv.decomposed_layers == 1
        and not torch.jit.is_tracing()
        and not is_transformed()
        and not any(getattr(conv, hooks) for hooks in _HOOKS)
        and not (isinstance(edge_index, EdgeIndex) and _multiplies_against_flow(conv, edge_index))
    )


def is_transformed() -> bool:
    """Return whether a forward-mode derivative or a transform of `torch.func` is active. Compiled code has neither."""
    return not torch.compiler.is_compiling() and (in_forward_mode() or in_transform())


def _multiplies_against_flow(conv: MessagePassing, edge_index: EdgeIndex) -> bool:
    """Return whether the layer multiplies by `edge_index` as a matrix, which ignores `flow="target_to_source"`."""
    return (
        conv.flow == "target_to_source"
        and conv.fuse
        and conv.SUPPORTS_FUSED_EDGE_INDEX
        and edge_index.is_sorted_by_col
    )


def fits_size(conv: MessagePassing, edge_index: Tensor, targets: int, sources: int) -> bool:
    """Return whether the numbers of targets and sources match those that `edge_index` declares. Only an EdgeIndex declares them."""
    if not isinstance(edge_index, EdgeIndex):
        return True
    sizes = (sources, targets) if conv.flow == "source_to_target" else (targets, sources)
    return all(size in (None, count) for size, count in zip(edge_index.sparse_size(), sizes, strict=True))
