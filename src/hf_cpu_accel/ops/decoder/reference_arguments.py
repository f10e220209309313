"""Access of the reference of decoder_layers to a layer's arguments: projections, norms, heads and rotation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cpu_accel.ops.decoder.bind import LAYOUT, NORM_KINDS, NORM_SCOPES, SCALARS
from hf_cpu_accel.ops.linear import linear_reference


class LayerArguments:
    """The arguments of one layer by name, and the application of its weights."""

    def __init__(
        self, weights: list[Tensor], vectors: Tensor, layout: list[int], scalars: list[float]
    ) -> None:
        self.weights, self.vectors = weights, vectors
        self.integers = dict(zip(LAYOUT, layout, strict=True))
        self.floats = dict(zip(SCALARS, scalars, strict=True))

    def integer(self, name: str) -> int:
        return self.integers[name]

    def weight(self, name: str) -> Tensor | None:
        place = self.integers[name]
        return None if place < 0 else self.weights[place]

    def vector(self, name: str, size: int) -> Tensor | None:
        first = self.integers[name]
        return None if first < 0 else self.vectors[first : first + size]

    def project(self, name: str, x: Tensor, out_features: int, activation: str = "none") -> Tensor:
        data = self.weight(name)
        assert data is not None
        scale, bias = self.weight(f"{name}_scale"), self.vector(f"{name}_bias", out_features)
        return linear_reference(x, data, scale, bias, None, out_features, activation)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """x [..., features]."""
        return self.scaled(name, self.centered(name, x), x.shape[-1:])

    def head_norm(self, name: str, x: Tensor) -> Tensor:
        """x [..., heads, head_dim]."""
        scope = NORM_SCOPES[self.integer(f"{name}_scope")]
        centered = self.centered(name, x.flatten(-2) if scope == "all heads" else x).reshape(x.shape)
        return self.scaled(name, centered, x.shape[-1:] if scope == "head" else x.shape[-2:])

    def centered(self, name: str, x: Tensor) -> Tensor:
        kind, eps = NORM_KINDS[self.integer(f"{name}_kind")], self.floats[f"{name}_eps"]
        if kind == "layer_norm":
            return F.layer_norm(x, x.shape[-1:], None, None, eps)
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) if kind == "rms_norm" else x

    def scaled(self, name: str, x: Tensor, shape: torch.Size) -> Tensor:
        weight, bias = (self.vector(f"{name}_{part}", shape.numel()) for part in ("weight", "bias"))
        x = x if weight is None else x * weight.view(shape)
        return x if bias is None else x + bias.view(shape)

    def heads_of(self, name: str, merged: Tensor, count: int, width: int) -> Tensor:
        """[B, q_len, count, width] of the qkv projection's output."""
        group = count // self.integer("kv_heads")
        first, stride, step = (self.integer(f"{name}_{part}") for part in ("first", "stride", "head_stride"))
        begin = torch.tensor([first + h // group * stride + h % group * step for h in range(count)])
        return merged[..., begin[:, None] + torch.arange(width)]

    def rotate(self, x: Tensor, tables: list[Tensor]) -> Tensor:
        """x [B, q_len, heads, head_dim] with its first rotary_dim features rotated."""
        rotary_dim, table = self.integer("rotary_dim"), 2 * self.integer("rotary")
        if rotary_dim == 0:
            return x
        interleaved, half = self.integer("rotary_interleaved"), rotary_dim // 2
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
