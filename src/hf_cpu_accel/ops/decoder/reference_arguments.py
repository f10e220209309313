"""Access of the reference of decoder_layers to a layer's arguments: projections, norms, heads and rotation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cpu_accel.abi import (
    NORM_KINDS,
    NORM_SCOPES,
    HeadsLayout,
    LayerLayout,
    LayerScalars,
    NormLayout,
    ProjectionLayout,
    read,
)
from hf_cpu_accel.ops.linear import linear_reference


class LayerArguments:
    """The arguments of one layer by name, and the application of its weights."""

    def __init__(
        self, weights: list[Tensor], vectors: Tensor, layout: list[int], scalars: list[float]
    ) -> None:
        self.weights, self.vectors = weights, vectors
        self.layout, self.scalars = read(LayerLayout, layout), read(LayerScalars, scalars)

    def weight(self, index: int) -> Tensor | None:
        return None if index < 0 else self.weights[index]

    def vector(self, first: int, size: int) -> Tensor | None:
        return None if first < 0 else self.vectors[first : first + size]

    def project(
        self, projection: ProjectionLayout, x: Tensor, out_features: int, activation: str = "none"
    ) -> Tensor:
        data = self.weight(projection.weight)
        assert data is not None
        scale, bias = self.weight(projection.scale), self.vector(projection.bias, out_features)
        return linear_reference(x, data, scale, bias, None, out_features, activation)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """x [..., features]."""
        return self.scaled(name, self.centered(name, x), x.shape[-1:])

    def head_norm(self, name: str, x: Tensor) -> Tensor:
        """x [..., heads, head_dim]."""
        scope = NORM_SCOPES[getattr(self.layout, f"{name}_scope")]
        centered = self.centered(name, x.flatten(-2) if scope == "all heads" else x).reshape(x.shape)
        return self.scaled(name, centered, x.shape[-1:] if scope == "head" else x.shape[-2:])

    def centered(self, name: str, x: Tensor) -> Tensor:
        kind, eps = NORM_KINDS[getattr(self.layout, name).kind], getattr(self.scalars, f"{name}_eps")
        if kind == "layer_norm":
            return F.layer_norm(x, x.shape[-1:], None, None, eps)
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) if kind == "rms_norm" else x

    def scaled(self, name: str, x: Tensor, shape: torch.Size) -> Tensor:
        norm: NormLayout = getattr(self.layout, name)
        weight, bias = (self.vector(first, shape.numel()) for first in (norm.weight, norm.bias))
        x = x if weight is None else x * weight.view(shape)
        return x if bias is None else x + bias.view(shape)

    def heads_of(self, heads: HeadsLayout, merged: Tensor, count: int, width: int) -> Tensor:
        """[B, q_len, count, width] of the qkv projection's output."""
        group = count // self.layout.kv_heads
        offsets = [h // group * heads.stride + h % group * heads.head_stride for h in range(count)]
        begin = heads.first + torch.tensor(offsets)
        return merged[..., begin[:, None] + torch.arange(width)]

    def rotate(self, x: Tensor, tables: list[Tensor]) -> Tensor:
        """x [B, q_len, heads, head_dim] with its first rotary_dim features rotated."""
        rotary_dim, table = self.layout.rotary_dim, 2 * self.layout.rotary
        if rotary_dim == 0:
            return x
        interleaved, half = self.layout.rotary_interleaved, rotary_dim // 2
        cos, sin = (part.float() for part in tables[table : table + 2])
        if cos.shape[-1] != half:  # every frequency twice, beside each other or half a row apart
            cos, sin = (part[..., ::2] if interleaved else part[..., :half] for part in (cos, sin))
        cos, sin = cos[:, :, None], sin[:, :, None]
        rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        if interleaved:
            first, second = rotated[..., ::2], rotated[..., 1::2]
        else:
            first, second = rotated[..., :half], rotated[..., half:]
        parts = (first * cos - second * sin, second * cos + first * sin)
        rotated = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
        return torch.cat([rotated, rest], dim=-1)
