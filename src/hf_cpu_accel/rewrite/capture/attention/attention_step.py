"""Attention as one step, with the shapes that the layer uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_cpu_accel.lazy.lazy_tensor import LazyTensor, VersionGuard
from hf_cpu_accel.ops.attention import attention
from hf_cpu_accel.rewrite.capture.program import Mismatch

_KIND = "recorded layer"


@dataclass(frozen=True)
class Bias:
    """A tensor that is added to scores.

    Attributes:
        factor: its factor.
        fill: the value that replaces the scores where it is true; None if it is added itself.
        is_of_windows: whether the batch of the scores is divided into images and windows meanwhile: [B, windows, heads, L,
            keys].
    """

    factor: float = 1.0
    fill: float | None = None
    is_of_windows: bool = False


class Attention:
    """softmax(cap(scale * factors * query key) + biases) values, with the shapes of the recorded steps.

    Args:
        scale: of the scores.
        factors: how many of the tensors after the values are factors; biases follow.
        biases: how each is added.
        heads: the number of heads into which the batch of the scores is divided while biases are added, or None.
        has_sink: whether the last tensor is a score [..., L, 1] of no key.
        softcap: of the scores, as in `ops.attention`.
    """

    __name__ = "attention"

    def __init__(
        self,
        scale: float,
        factors: int,
        biases: tuple[Bias, ...],
        heads: int | None,
        *,
        has_sink: bool = False,
        softcap: float | None = None,
    ) -> None:
        self.scale, self.factors, self.biases, self.heads = scale, factors, biases, heads
        self.has_sink, self.softcap = has_sink, softcap

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *more: Tensor) -> Tensor:
        """Compute query [..., L, D], key [..., D, keys], value [..., keys, E] -> [..., L, E].

        Raises:
            Mismatch: a factor depends on the key, or the shapes of scores differ from those of attention.
        """
        if self.has_sink:
            *more, sink = more  # type: ignore[assignment]
        query, bias = self._prepared(query, more)
        shape = query.shape[:-1]
        if self.has_sink:
            key, value, bias = _with_key_of_nothing(key, value, bias, sink)
        heads = [self._divided(part) for part in (query, key.mT, value)]
        if any(part.dim() != 4 for part in heads) or len({part.shape[:2] for part in heads}) > 1:
            return self._written(query, key, value, bias)
        if bias is not None:
            if bias.dim() == 3 and query.dim() == 3 and self.heads is None:
                bias = bias.unsqueeze(1)
            bias = bias[(None,) * (max(4, query.dim()) - bias.dim())]
            if bias.dim() > 4:
                bias = bias.expand(*query.shape[:-3], -1, -1, -1).flatten(0, bias.dim() - 4)
        output = attention(*heads, mask=bias, scale=self.scale, softcap=self.softcap).transpose(1, 2)
        return output if output.shape[:-1] == shape else output.reshape(*shape, output.shape[-1])

    def weights(self, query: Tensor, key: Tensor, value: Tensor, *more: Tensor) -> Tensor:
        """Return the attention weights [..., L, keys], which layers return without being asked: computed when they are read."""
        if self.has_sink:
            raise Mismatch
        query, bias = self._prepared(query, more)
        lazy: Weights = Weights.like((*query.shape[:-1], key.shape[-1]), value.dtype)
        lazy.made_of = (
            self,
            [None if part is None else VersionGuard(part, _KIND) for part in (query, key, bias)],
        )
        return lazy

    def _prepared(self, query: Tensor, more: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        for factor in more[: self.factors]:
            if factor.dim() and factor.shape[-1] != 1:
                raise Mismatch
            query = query * factor
        return query, self._bias(more[self.factors :], query)

    def _divided(self, part: Tensor) -> Tensor:
        """Return the tensor as [B, heads, L, D]."""
        if part.dim() == 3:
            return part.unsqueeze(1) if self.heads is None else part.unflatten(0, (-1, self.heads))
        return part.flatten(0, part.dim() - 4) if part.dim() > 4 else part

    def _bias(self, biases: Sequence[Tensor], query: Tensor) -> Tensor | None:
        total: Tensor | None = None
        for bias, how in zip(biases, self.biases, strict=True):
            part = bias.bool() if how.fill is not None else bias.to(query.dtype)
            part = _of_all_windows(part, query.shape[0]) if how.is_of_windows else part
            if how.fill is not None:  # it also replaces earlier biases
                total = torch.where(part, how.fill, query.new_zeros(()) if total is None else total)
                continue
            part = part if how.factor == 1 else part * how.factor
            total = part if total is None else total + part
        return total

    def _written(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        return torch.matmul(self.softmax(query, key, bias).to(value.dtype), value)

    def softmax(self, query: Any, key: Any, bias: Tensor | None) -> Tensor:
        """Return the weights, computed by plain torch."""
        scores = torch.matmul(query, key) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.heads is not None and bias is not None:
            scores = (scores.unflatten(0, (-1, self.heads)) + bias).flatten(0, 1)
        elif bias is not None:
            scores = scores + bias
        return functional.softmax(scores, -1)


class Weights(LazyTensor):
    """Attention weights that are computed when they are read.

    Attributes:
        made_of: the attention, queries, keys and the biases of scores.
    """

    made_of: tuple[Attention, list[VersionGuard | None]]

    def _make(self) -> Tensor:
        attention, guards = self.made_of
        return attention.softmax(*(None if guard is None else guard.tensor() for guard in guards)).to(
            self.dtype
        )

    def _forget(self) -> None:
        del self.made_of


def _with_key_of_nothing(
    key: Tensor, value: Tensor, bias: Tensor | None, sink: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys [..., D, keys + 1], values [..., keys + 1, E] and biases [..., L, keys + 1], with a key of zeros whose score
    is `sink`."""
    bias = sink.new_zeros(()) if bias is None else bias
    bias = torch.cat((bias.expand(*sink.shape[:-1], key.shape[-1]), sink.to(bias.dtype)), dim=-1)
    return functional.pad(key, (0, 1)), functional.pad(value, (0, 0, 0, 1)), bias


def _of_all_windows(bias: Tensor, batch: int) -> Tensor:
    """Return a bias [B or 1, windows or 1, heads or 1, L, keys] as [batch, heads or 1, L, keys], where the batch has all
    windows.

    Raises:
        Mismatch: the sizes do not match.
    """
    bias = bias[(None,) * (5 - bias.dim())]
    windows = bias.shape[1]
    if batch % windows or bias.shape[0] not in (1, batch // windows):
        raise Mismatch
    return bias.expand(batch // windows, -1, -1, -1, -1).flatten(0, 1)
