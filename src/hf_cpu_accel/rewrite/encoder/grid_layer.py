"""Layer fusion for encoder layers over images [B, height, width, C] with row and column biases (ViTDet, Li et al. 2022,
arXiv:2203.16527; SAM): in whole windows, or over the whole image, with biases that depend on the query.

A score gains query . R[row of the query - row of the key], and the same for columns. These products, one for each row and column
of keys, are further features of the query; a key's are ones at its own row and column. So attention needs no matrix of biases,
which for 64 x 64 tokens and 12 heads takes 800 MB. A layer is six ops: norm, query | key | value, attention, output and sum,
norm, feed-forward network and sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel.ops.attention import attention
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, Reference
from hf_cpu_accel.providers.route import Route
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.linear.dispatch import FFNWork, LinearWork, Part
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.runtime.tracing import is_tracing


@dataclass(frozen=True)
class GridParts:
    """A layer by the paths of its parts.

    Attributes:
        head_size: features of a head.
        tables: of the parameters R for rows and for columns, [2 * side - 1, head_size] each; none without biases.
        window: the side of the windows, 0 where all tokens attend to all.
        channels_first: whether input and output are [B, C, height, width].
        outputs: the length of the tuple that it returns, None if it returns none.
    """

    attention_norm: str
    qkv: str
    head_size: int
    tables: tuple[str, ...]
    output: str
    ffn_norm: str
    up: str
    down: str
    activation: str
    window: int
    channels_first: bool
    outputs: int | None

    @property
    def linears(self) -> tuple[str, ...]:
        return self.qkv, self.output, self.up, self.down


class FusedGridLayer(FusedModuleMixin):
    """Mixed into the layer's own class, whose forward runs where hooks read values inside, where the caller asks for more than
    hidden states, and while a graph is traced."""

    _parts: GridParts
    _bound: _Bound | None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on hidden_states [B, height, width, C], or in the shape of the original; returns what the original
        returns."""
        if not self._serves(hidden_states, (*args, *kwargs.values())):
            return self._original_class.forward(self, hidden_states, *args, **kwargs)
        check_inference(self, hidden_states)
        parts, bound = self._parts, self._bound
        if bound is None:
            bound = self._bound = _Bound.of(self, parts)
        image = hidden_states.permute(0, 2, 3, 1) if parts.channels_first else hidden_states
        tables = [self.get_parameter(path) for path in parts.tables]
        output = bound(image, tables, parts)
        output = output.permute(0, 3, 1, 2) if parts.channels_first else output
        return output if parts.outputs is None else (output, *(None,) * (parts.outputs - 1))

    def reference_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reference | None:
        given = (*args, *kwargs.values())
        return Reference(args, kwargs) if args and self._serves(given[0], given[1:]) else None

    def _serves(self, hidden_states: Any, others: tuple[Any, ...]) -> bool:
        if not isinstance(hidden_states, Tensor) or hidden_states.dim() != 4 or not hidden_states.numel():
            return False
        if is_tracing() or self.is_watched:
            return False
        return all(value is None or value is False for value in others)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedGridLayer:
        super()._apply(fn, recurse)
        self._bound = None  # it holds copies of the biases
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bound": None}


@dataclass(frozen=True)
class _Bound:
    """A layer's norms, and the routes of its linears: `output` and `ffn` add to their second input."""

    attention_norm: Any
    qkv: Route
    output: Route
    ffn_norm: Any
    ffn: Route

    @classmethod
    def of(cls, layer: nn.Module, parts: GridParts) -> _Bound:
        qkv, output, up, down = (_linear(layer, path) for path in parts.linears)
        work = FFNWork(_part(up), _part(down), parts.activation, residual=True)
        return cls(
            layer.get_submodule(parts.attention_norm),
            Route(LinearWork(_part(qkv)), measured=qkv.group.measured),
            Route(LinearWork(_part(output), residual=True), measured=output.group.measured),
            layer.get_submodule(parts.ffn_norm),
            Route(work, measured=up.group.measured),
        )

    def __call__(self, image: Tensor, tables: list[nn.Parameter], parts: GridParts) -> Tensor:
        """Compute image [B, height, width, C], tables [2 * side - 1, head_size] -> [B, height, width, C]."""
        height, width, window = *image.shape[1:3], parts.window
        normed = self.attention_norm(image)
        grid = _windows(normed, window) if window else normed
        attended = _attend(self.qkv(grid), tables, parts.head_size)
        if window:
            attended = _joined(attended, height, width)
        x = self.output(attended, image)
        done: Tensor = self.ffn(self.ffn_norm(x), x)
        return done


def _linear(layer: nn.Module, path: str) -> PackedLinear:
    linear = layer.get_submodule(path)
    assert isinstance(linear, PackedLinear)
    return linear


def _part(linear: PackedLinear) -> Part:
    return linear.group.part(linear.index, linear.index)


def _attend(qkv: Tensor, tables: list[nn.Parameter], head_size: int) -> Tensor:
    """Compute qkv [N, h, w, 3 * heads * head_size] -> [N, h, w, heads * head_size]."""
    query, key, value = qkv.unflatten(-1, (3, -1, head_size)).unbind(3)  # [N, h, w, heads, head_size]
    height, width = query.shape[1:3]
    scale = head_size**-0.5
    if tables:
        query, key = _with_places(query, key, *((table / scale).to(query.dtype) for table in tables))
    heads = [part.flatten(1, 2).transpose(1, 2) for part in (query, key, value)]
    return attention(heads[0], heads[1], heads[2], scale=scale).flatten(2).unflatten(1, (height, width))


def _with_places(query: Tensor, key: Tensor, of_rows: Tensor, of_columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return query and key [N, h, w, heads, head_size] with h + w more features, whose products are the biases."""
    height, width = query.shape[1:3]
    by_row = torch.einsum("bhwnd,hkd->bhwnk", query, _by_distance(of_rows, height))
    by_column = torch.einsum("bhwnd,wkd->bhwnk", query, _by_distance(of_columns, width))
    at_row = torch.eye(height, dtype=key.dtype)[:, None, None].expand(*key.shape[:-1], -1)
    at_column = torch.eye(width, dtype=key.dtype)[:, None].expand(*key.shape[:-1], -1)
    return torch.cat([query, by_row, by_column], dim=-1), torch.cat([key, at_row, at_column], dim=-1)


def _by_distance(table: Tensor, side: int) -> Tensor:
    """Return R[query - key] as [side, side, head_size] for `side` rows or columns; the table is interpolated to that size."""
    wanted = 2 * side - 1
    if len(table) != wanted:
        table = functional.interpolate(table.T[None], size=wanted, mode="linear")[0].T
    place = torch.arange(side)
    return table[place[:, None] - place + side - 1]


def _windows(image: Tensor, side: int) -> Tensor:
    """Return [B, height, width, C] as [B * windows, side, side, C], with zeros beyond the image."""
    height, width = image.shape[1:3]
    image = functional.pad(image, (0, 0, 0, -width % side, 0, -height % side))
    cut = image.unflatten(2, (-1, side)).unflatten(1, (-1, side))  # [B, rows, side, columns, side, C]
    return cut.transpose(2, 3).flatten(0, 2)


def _joined(windows: Tensor, height: int, width: int) -> Tensor:
    """Invert `_windows`, without the part beyond the image."""
    side = windows.shape[1]
    rows, columns = -(-height // side), -(-width // side)
    image = windows.unflatten(0, (-1, rows, columns)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return image[:, :height, :width]
