"""Match the scores of a layer that computes its attention itself, from the products of queries and keys: their scale, ALiBi's
slopes, and the hidden keys.

ALiBi (Press et al. 2022, arXiv:2108.12409) subtracts `slope * distance` from a score. Hosts pass it to their layers as a bias of
the keys alone, `slope * position`: the rest is equal for all keys of a query, and softmax cancels it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_cpu_accel.check import compare
from hf_cpu_accel.lazy.remember import remember
from hf_cpu_accel.rewrite.decoder.calls import LayerCall
from hf_cpu_accel.rewrite.decoder.trace import AttentionCall
from hf_cpu_accel.tolerance import LINE, SLOPES

# Allowed distance of a bias from a line, relative to its largest value: rounding, in bfloat16 also of the slopes.
_DTYPES = (torch.float32, torch.bfloat16)  # of biases
_TRUTHS = (torch.bool, torch.uint8)


@dataclass(frozen=True)
class Scores:
    """The input of softmax: scale * query key^T + slopes * position, [heads]; None without slopes.

    Attributes:
        hides: whether the layer itself hides later keys (GPT-Neo), and those outside of a window of so many keys if it is not
            None.
    """

    scale: float
    slopes: Tensor | None = None
    hides: bool = False
    window: int | None = None


def read_scores(
    call: AttentionCall, key: Tensor, dtype: torch.dtype, buffers: Iterable[Tensor]
) -> Scores | None:
    """Return how the scores of `call` follow from its query and the stored `key`, or None.

    Only the last sequence counts, which has no padding.

    Args:
        dtype: dtype in which the host computed the arguments of the layer.
        buffers: of the layer; one of them may hold the keys that it hides itself.
    """
    assert call.scores is not None
    query, key, scores = (part[-1].double() for part in (call.query, key, call.scores))
    heads, positions = len(query), torch.arange(key.shape[1], dtype=torch.float64)
    if heads % len(key) or not scores.isfinite().all():
        return None
    of_heads = scores > torch.finfo(torch.float32).min / 2
    seen, hides = of_heads[0], not of_heads.all()
    hidden = _hidden(seen, buffers) if hides else (None,)
    if hidden is None or not (of_heads == seen).all():
        return None
    key = key.repeat_interleave(heads // len(key), dim=0)
    products, scores = _centered(query @ key.mT, seen), _centered(scores, seen)
    # One column for the scale, and one for each head's slope.
    positions = _centered(positions.expand(*products.shape), seen)
    ramps = torch.diag_embed(positions.permute(1, 2, 0)).permute(2, 0, 1, 3)
    columns = torch.cat([products[..., None], ramps], dim=-1).flatten(0, 2)
    found = torch.linalg.lstsq(columns, scores.flatten()[:, None]).solution[:, 0]
    bound = LINE.of(dtype)
    if compare(columns @ found, scores.flatten()).agreement.max_relative_error > bound:
        return None
    scale, slopes = found[0].item(), found[1:].float()
    usual = query.shape[-1] ** -0.5
    scale = next((known for known in (usual, 1.0) if abs(scale / known - 1) < bound), scale)
    has_slopes = slopes.abs().max() > bound * scores.abs().max()
    return Scores(scale, slopes if has_slopes else None, hides, *hidden)


def _hidden(seen: Tensor, buffers: Iterable[Tensor]) -> tuple[int | None] | None:
    """Return the window of a layer whose first tokens see one another as in `seen`, bool [L, L], from a buffer for all positions
    that begins so. In it a query sees itself and the keys before it, or a window of them. None without such a buffer."""
    tokens = len(seen)
    for buffer in buffers:
        length = buffer.shape[-1] if buffer.dim() else 0
        if buffer.dtype not in _TRUTHS or buffer.numel() != length**2 or length < tokens:
            continue
        table = buffer.view(length, length).bool()
        window = int(table[-1].sum())
        earlier = torch.ones_like(table).tril()
        is_windowed = torch.equal(table, earlier & ~earlier.tril(-window))
        if is_windowed and torch.equal(table[:tokens, :tokens], seen):
            return (window if window < length else None,)
    return None


@dataclass(frozen=True, eq=False)
class Slopes:
    """The argument `name` of a layer, a bias of the keys, and its slopes [heads] float32.

    The bias is [heads, 1, kv_len or more] or, with the heads of all sequences one after another, [B * heads, 1, ...]; the last
    columns count. Scores get `factor` times its values.
    """

    name: str
    slopes: Tensor
    factor: float

    def says(self, bias: object, tokens: Tensor | None, batch: int, kv_len: int) -> bool:
        """Return whether `bias` has these slopes over all tokens, bool [B, kv_len] or None for all positions."""
        if not isinstance(bias, Tensor) or bias.dim() != 3 or bias.shape[1] != 1 or bias.shape[2] < kv_len:
            return False
        if bias.shape[0] not in (len(self.slopes), batch * len(self.slopes)):
            return False
        key = "slopes", self, kv_len
        return remember(bias, key, lambda: self._says(bias, tokens, kv_len), also=(tokens,), by_value=True)

    def _says(self, bias: Tensor, tokens: Tensor | None, kv_len: int) -> bool:
        rows = self.factor * _rows(bias, len(self.slopes), kv_len).float()  # [B or 1, heads, keys]
        position = torch.arange(kv_len)
        if tokens is None:
            distance, first = position[None, None], rows[..., :1]
        else:
            begin = tokens.int().argmax(dim=1)
            distance = (position - begin[:, None])[:, None]
            first = rows.expand(len(tokens), -1, -1).gather(
                2, begin[:, None, None].expand(-1, rows.shape[1], 1)
            )
        error = (rows - first - self.slopes[:, None] * distance).abs()
        if tokens is not None:
            error = error * tokens[:, None]
        bound = SLOPES.of(bias.dtype) * rows.abs().amax(dim=-1, keepdim=True)
        return bool((error <= bound).all())

    def like(self, bias: Tensor, start: Tensor, kv_len: int) -> Tensor:
        """Return the bias that a host passes for `kv_len` keys if it passed `bias`, for sequences that begin at `start` [B]."""
        heads = len(self.slopes)
        if bias.shape[0] == heads:
            return bias
        position = (torch.arange(kv_len) - start[:, None]).clamp_min(0)[:, None]
        made = self.slopes[:, None] / self.factor * position
        return made.view(len(start) * heads, 1, kv_len).to(bias.dtype)


def find_slopes(call: LayerCall, slopes: Tensor) -> Slopes | None:
    """Return the argument that gives the layer's scores their `slopes` [heads], or None."""
    heads, keys, bound = len(slopes), call.hidden_states.shape[1], 10 * LINE.of(call.hidden_states.dtype)
    for name, value in call.arguments.items():
        if not isinstance(value, Tensor) or value.dim() != 3 or value.dtype not in _DTYPES:
            continue
        if value.shape[0] % heads or value.shape[1] != 1 or value.shape[2] < keys:
            continue
        # All keys: with more of them rounding matters less.
        row = _rows(value, heads, value.shape[2])[-1].double()
        ramp = _centered(torch.arange(row.shape[1], dtype=torch.float64))
        given = (_centered(row) @ ramp) / ramp.square().sum()
        factor = ((slopes.double() @ given) / given.square().sum().clamp_min(1e-30)).item()
        factor = 1.0 if abs(factor - 1) < bound else factor
        found = Slopes(name, (given * factor).float(), factor)
        if compare(found.slopes, slopes).agreement.max_relative_error <= bound:
            return found
    return None


def _rows(bias: Tensor, heads: int, keys: int) -> Tensor:
    return bias[..., -keys:].reshape(-1, heads, keys)


def _centered(values: Tensor, seen: Tensor | None = None) -> Tensor:
    """Subtract the mean of each row, or of its visible part; 0 elsewhere."""
    if seen is None:
        return values - values.mean(dim=-1, keepdim=True)
    shown = values.masked_fill(~seen, 0)
    return (shown - shown.sum(dim=-1, keepdim=True) / seen.sum(dim=-1, keepdim=True)) * seen
