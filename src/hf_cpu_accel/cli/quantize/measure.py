"""What each linear loses by each dtype: the error of its outputs, and what that does to the answers of the model.

The second is an estimate, for all linears and dtypes at once. With outputs off by e_t at the tokens t, the distribution of answers
moves by a divergence (KL) of 1/2 E[(sum_t g_t e_t)^2] to second order: g_t is the gradient of the logarithm of the probability of
answers that are drawn from the model itself, and E the mean over them (the Fisher information). A few draws are enough, and a
backward pass for each. Of models without logits the direction of the outputs is taken, drawn on at random, so that it is
1 - cosine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cpu_accel.measure.agreement import float_tensors
from hf_cpu_accel.ops.linear import linear
from hf_cpu_accel.packing.linear import PackedWeight
from hf_cpu_accel.rewrite.core.calibration import Example
from hf_cpu_accel.rewrite.linear.layer import PackedLinear

_DRAWS = 2  # of answers to each example
_COMPARED = 512  # rows of answers

Packed = Mapping[str, PackedWeight]


@dataclass(frozen=True)
class Option:
    """A linear in one dtype.

    Attributes:
        dtype: that it is asked for in; `form` is what it is packed as.
        error: of its outputs, root mean square, relative to their size.
        loss: estimated, of the model's answers, if this linear alone is quantized.
    """

    dtype: str
    form: str
    nbytes: int
    error: float
    loss: float


@dataclass(frozen=True)
class LinearLosses:
    """The options of the linear at `path`, by their dtypes, the coarsest first."""

    path: str
    options: dict[str, Option]


class Answers:
    """The model's outputs to the first examples as they are now, to measure how far later ones are from them."""

    def __init__(self, model: nn.Module, examples: Sequence[Example]) -> None:
        self._examples = examples
        self._before: list[Tensor] = []
        with torch.no_grad():
            for example in examples:
                if sum(map(len, self._before)) < _COMPARED:
                    rows, self.of_logits = _rows(example.call(model), example)
                    self._before.append(_in_probabilities(rows, self.of_logits))

    def loss(self, model: nn.Module) -> float:
        """Mean divergence in nats, or mean 1 - cosine."""
        total, count = 0.0, 0
        with torch.no_grad():
            for example, before in zip(self._examples, self._before, strict=False):
                now = _in_probabilities(_rows(example.call(model), example)[0], self.of_logits)
                difference = before.exp() * (before - now) if self.of_logits else before * (before - now)
                total += difference.sum().item()
                count += len(before)
        return total / max(count, 1)


def packed_linears(model: nn.Module) -> dict[str, PackedWeight]:
    """{path: packed weight} of the linears of an accelerated model."""
    linears = ((path, m) for path, m in model.named_modules() if isinstance(m, PackedLinear))
    return {path: linear.group.in_own_order(linear.index) for path, linear in linears}


def measure(
    model: nn.Module,
    examples: Sequence[Example],
    packed: Mapping[str, Packed],
    on_step: Callable[[], None] = lambda: None,
) -> list[LinearLosses]:
    """
    Args:
        model: as it was made, with float32 weights.
        packed: by the dtypes that were asked for, the coarsest first, of which that decides what is looked at; see
            `packed_linears`.
        on_step: called behind each backward pass; there are `steps(examples)`.
    """
    first = next(iter(packed.values()))
    paths = [path for path in first if all(path in some for some in packed.values())]
    sums = _Sums(packed)
    generator = torch.Generator().manual_seed(0)
    rows = 0
    for example in examples:
        for _ in range(_DRAWS):
            with torch.enable_grad(), _watched(model, paths, sums):
                answers, of_logits = _rows(example.call(model), example)
                _drawn(answers, of_logits, generator).backward()
            sums.square(example.batch)
            rows += len(answers)
            on_step()
    return [LinearLosses(path, {dtype: sums.option(dtype, path, rows) for dtype in packed}) for path in paths]


def steps(examples: Sequence[Example]) -> int:
    return len(examples) * _DRAWS


class _Sums:
    """Of all linears in all dtypes: squares of outputs and errors, and products of errors with gradients."""

    def __init__(self, packed: Mapping[str, Packed]) -> None:
        self._packed = packed
        self._outputs: dict[str, float] = defaultdict(float)
        self._errors: dict[tuple[str, str], float] = defaultdict(float)
        self._products: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
        self._losses: dict[tuple[str, str], float] = defaultdict(float)

    def add(self, path: str, input: Tensor, output: Tensor, gradient: Tensor) -> None:
        """Of one call: `output` is without bias."""
        self._outputs[path] += output.square().sum().item()
        for dtype, packed in self._packed.items():
            error = linear(input, packed[path]) - output
            self._errors[dtype, path] += error.square().sum().item()
            self._products[dtype, path].append(error.mul_(gradient))

    def square(self, batch: int) -> None:
        """The calls since the last time were one draw of `batch` examples."""
        for key, products in self._products.items():
            apart = all(product.numel() % batch == 0 for product in products)
            drawn = sum(product.reshape(batch if apart else 1, -1).sum(1) for product in products)
            assert isinstance(drawn, Tensor)
            self._losses[key] += 0.5 * drawn.square().sum().item()
        self._products.clear()

    def option(self, dtype: str, path: str, rows: int) -> Option:
        packed = self._packed[dtype][path]
        error = (self._errors[dtype, path] / max(self._outputs[path], 1e-30)) ** 0.5
        return Option(dtype, packed.dtype, packed.nbytes, error, self._losses[dtype, path] / max(rows, 1))


@contextmanager
def _watched(model: nn.Module, paths: Sequence[str], sums: _Sums) -> Iterator[None]:
    """Inside, a backward pass tells `sums` of each linear's calls."""
    handles = [model.get_submodule(path).register_forward_hook(partial(_watch, path, sums)) for path in paths]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watch(path: str, sums: _Sums, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    input, bias = args[0].detach(), module._parameters.get("bias")
    kept = output.detach() if bias is None else output.detach() - bias.detach()
    # A leaf, so that there is a gradient whether or not the weights ask for any.
    output = output + torch.zeros((), requires_grad=True)
    output.register_hook(lambda gradient: sums.add(path, input, kept, gradient))
    return output


def _rows(output: Any, example: Example) -> tuple[Tensor, bool]:
    """The answers [rows, C] without those at padding, and whether they are logits."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor) and logits.dim() > 1 and logits.shape[-1] > 1:
        return example.rows(logits).float(), True
    return example.rows(float_tensors_of(output)).float(), False


def float_tensors_of(output: Any) -> Tensor:
    """The first tensor of floats in `output`, with its gradient.

    Raises:
        ValueError: there is none.
    """
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output
    for value in values if isinstance(values, list | tuple) or isinstance(output, Mapping) else ():
        if isinstance(value, Tensor) and value.is_floating_point() and float_tensors(value):
            return value
    raise ValueError(f"a {type(output).__name__} holds no tensor of floats: nothing can be measured on it")


def _in_probabilities(rows: Tensor, of_logits: bool) -> Tensor:
    return rows.log_softmax(-1) if of_logits else F.normalize(rows, dim=-1)


def _drawn(rows: Tensor, of_logits: bool, generator: torch.Generator) -> Tensor:
    """A number whose gradient has the Fisher information as its variance."""
    values = _in_probabilities(rows, of_logits)
    if of_logits:
        words = torch.multinomial(values.detach().exp(), 1, generator=generator)
        return values.gather(1, words).sum()
    return (values * torch.randn(values.shape, generator=generator)).sum()
