"""Find the windows of a layer and the biases of their scores in one run on rows that all differ."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.rewrite.core.grouping import disable_grouping
from hf_cpu_accel.rewrite.core.trace import MATMUL, SOFTMAX, Listener, traced
from hf_cpu_accel.rewrite.encoder.arguments import hidden_states_of
from hf_cpu_accel.rewrite.encoder.parts import EncoderLayerParts
from hf_cpu_accel.tolerance import WINDOW_BIAS

_ATTENTION = torch.ops.hf_cpu_accel.attention.default


Run = Callable[[Tensor], Any]  # the layer's own forward: [1, height * width, C] -> what it returns


@dataclass(frozen=True, eq=False)
class Windows:
    """The windows of images of one size.

    Attributes:
        rows: int32 [windows, tokens of a window], the row of each token in [height * width].
        bias: the biases of the scores, [windows or 1, heads, tokens, tokens].
    """

    rows: Tensor
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + (0 if self.bias is None else self.bias.nbytes)


def trace_windows(
    layer: nn.Module, parts: EncoderLayerParts, image: Tensor, run: Run
) -> tuple[Tensor, Windows | None]:
    """Return the output of `run` for `image`, whose rows all differ, and its windows, or None if it does more than cut windows."""
    inputs: list[Tensor] = []
    scores, thread = _Scores(parts.scale), get_ident()

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if get_ident() == thread:  # and not of another call of the model
            inputs.append(args[0])

    with ExitStack() as watching:
        watching.enter_context(disable_grouping())
        hook = parts.projections[0].register_forward_pre_hook(note)
        watching.callback(hook.remove)
        watching.enter_context(traced(ops=scores.ops, functions=scores.functions))
        output = run(image)
    expected = hidden_states_of(output)
    if isinstance(output, tuple) and any(value is not None for value in output[1:]):
        return expected, None
    norm = None if parts.attention_norm is None else parts.attention_norm[0]
    normed = (image if norm is None or not parts.pre_norm else norm(image)).flatten(0, 1)
    if len(inputs) != 1 or len(scores.biases) != 1 or inputs[0].dim() != 3:
        return expected, None
    cut = inputs[0]
    if cut.shape[0] * cut.shape[1] != len(normed):
        return expected, None
    rows = _places(cut.flatten(0, 1), normed)
    (bias,) = scores.biases
    if rows is None or (bias is not None and (bias.dim() != 4 or len(cut) % len(bias) != 0)):
        return expected, None
    rows = rows.view(cut.shape[:2]).int()
    return expected, Windows(rows, None if bias is None else bias.contiguous())


def _places(cut: Tensor, rows: Tensor) -> Tensor | None:
    """Return int64, the index in `rows` of each row of `cut`, if it is a permutation of them, or None."""
    weights = torch.randn(rows.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    order, given = ((tensor.double() @ weights).argsort() for tensor in (rows, cut))
    offsets = torch.empty_like(order)
    offsets[given] = order
    return offsets if torch.equal(rows[offsets], cut) else None


class _Scores:
    """Record the biases of attention scores, in our op or written out: there, the difference between the input of softmax and
    the product of queries and keys."""

    def __init__(self, scale: float) -> None:
        self.biases: list[Tensor | None] = []
        self._scale = scale
        self._product: Tensor | None = None
        self.ops: dict[Any, Listener] = {_ATTENTION: self._attended}
        self.functions: dict[Any, Listener] = {
            **dict.fromkeys(MATMUL, self._multiplied),
            **dict.fromkeys(SOFTMAX, self._softmax),
        }

    def _attended(self, args: Any, kwargs: Any, output: Any) -> None:
        self.biases.append(args[3] if len(args) > 3 else None)

    def _multiplied(self, args: Any, kwargs: Any, output: Any) -> None:
        if len(args) == 2 and all(tensor.dim() == 4 for tensor in args):
            self._product = output if self._product is None else None

    def _softmax(self, args: Any, kwargs: Any, output: Any) -> None:
        if args and self._product is not None and args[0].shape == self._product.shape:
            bias = args[0] - self._scale * self._product
            alike = compare(bias, bias[:1].expand_as(bias)).within(WINDOW_BIAS)
            self.biases.append(bias[:1] if alike else bias)
