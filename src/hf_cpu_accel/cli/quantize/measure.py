"""Measure the loss of each linear in each dtype: the error of its outputs, and the resulting loss of the model's outputs.

The loss of the model is an estimate, for all linears and dtypes at once. If the outputs of a linear differ by e_t at token t, the
distribution of the model's outputs moves by a KL divergence of 1/2 E[(sum_t g_t e_t)^2] to second order. Here g_t is the gradient
of the log-probability of labels that are sampled from the model itself, and E is the mean over the samples (the Fisher
information). A few samples are enough, with one backward pass each. For models without logits, the same estimate uses random
projections of the normalized outputs, and the loss is 1 - cosine.
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

from hf_cpu_accel.ops.linear import linear
from hf_cpu_accel.packing.linear import PackedWeight
from hf_cpu_accel.rewrite.core.calibration import Example
from hf_cpu_accel.rewrite.linear.layer import PackedLinear

_SAMPLES = 2  # per example
_REFERENCE_ROWS = 512  # of outputs

Packed = Mapping[str, PackedWeight]


@dataclass(frozen=True)
class Option:
    """A linear in one dtype.

    Attributes:
        dtype: the requested dtype.
        form: the format that the weight is packed in.
        nbytes: size of the packed weight in bytes.
        error: root mean square error of the outputs, relative to their root mean square.
        loss: estimated loss of the model's outputs if only this linear is quantized.
    """

    dtype: str
    form: str
    nbytes: int
    error: float
    loss: float


@dataclass(frozen=True)
class LinearLosses:
    """The options of the linear at `path`, {dtype: option}, the coarsest dtype first."""

    path: str
    options: dict[str, Option]


class ReferenceOutputs:
    """The outputs of a model for the first examples, to measure the loss after quantization."""

    def __init__(self, model: nn.Module, examples: Sequence[Example]) -> None:
        self._examples = examples
        self._before: list[Tensor] = []
        with torch.no_grad():
            for example in examples:
                if sum(map(len, self._before)) < _REFERENCE_ROWS:
                    rows, self.of_logits = _rows(example.call(model), example)
                    self._before.append(_normalize(rows, self.of_logits))

    def loss(self, model: nn.Module) -> float:
        """Return the mean KL divergence in nats, or the mean 1 - cosine without logits."""
        total, count = 0.0, 0
        with torch.no_grad():
            for example, before in zip(self._examples, self._before, strict=False):
                now = _normalize(_rows(example.call(model), example)[0], self.of_logits)
                difference = before.exp() * (before - now) if self.of_logits else before * (before - now)
                total += difference.sum().item()
                count += len(before)
        return total / max(count, 1)


def packed_linears(model: nn.Module) -> dict[str, PackedWeight]:
    """Return {path: packed weight} of the linears of an accelerated model."""
    linears = ((path, m) for path, m in model.named_modules() if isinstance(m, PackedLinear))
    return {path: linear.group.in_own_order(linear.index) for path, linear in linears}


def measure(
    model: nn.Module,
    examples: Sequence[Example],
    packed: Mapping[str, Packed],
    on_step: Callable[[], None] = lambda: None,
) -> list[LinearLosses]:
    """Measure the losses of all linears in all dtypes.

    Args:
        model: the original model, with float32 weights.
        examples: the inputs.
        packed: {dtype: result of `packed_linears`}, the coarsest dtype first. The linears of the first dtype that are in all
            others are measured.
        on_step: called after each of the `steps(examples)` backward passes.
    """
    first = next(iter(packed.values()))
    paths = [path for path in first if all(path in linears for linears in packed.values())]
    sums = _Sums(packed)
    generator = torch.Generator().manual_seed(0)
    rows = 0
    for example in examples:
        for _ in range(_SAMPLES):
            with torch.enable_grad(), _observe(model, paths, sums):
                outputs, of_logits = _rows(example.call(model), example)
                _sampled_score(outputs, of_logits, generator).backward()
            sums.square(example.batch)
            rows += len(outputs)
            on_step()
    return [LinearLosses(path, {dtype: sums.option(dtype, path, rows) for dtype in packed}) for path in paths]


def steps(examples: Sequence[Example]) -> int:
    """Return the number of backward passes of `measure`."""
    return len(examples) * _SAMPLES


class _Sums:
    """Sums for all linears in all dtypes: squares of outputs and errors, and products of errors and gradients."""

    def __init__(self, packed: Mapping[str, Packed]) -> None:
        self._packed = packed
        self._outputs: dict[str, float] = defaultdict(float)
        self._errors: dict[tuple[str, str], float] = defaultdict(float)
        self._products: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
        self._losses: dict[tuple[str, str], float] = defaultdict(float)

    def add(self, path: str, input: Tensor, output: Tensor, gradient: Tensor) -> None:
        """Add one call of the linear at `path`; `output` is without the bias."""
        self._outputs[path] += output.square().sum().item()
        for dtype, packed in self._packed.items():
            error = linear(input, packed[path]) - output
            self._errors[dtype, path] += error.square().sum().item()
            self._products[dtype, path].append(error.mul_(gradient))

    def square(self, batch: int) -> None:
        """Finish one sample of `batch` examples: add the squares of the products that were added since the last sample."""
        for key, products in self._products.items():
            separable = all(product.numel() % batch == 0 for product in products)
            total = sum(product.reshape(batch if separable else 1, -1).sum(1) for product in products)
            assert isinstance(total, Tensor)
            self._losses[key] += 0.5 * total.square().sum().item()
        self._products.clear()

    def option(self, dtype: str, path: str, rows: int) -> Option:
        """Return the error and the loss of one linear in one dtype, per row of outputs."""
        packed = self._packed[dtype][path]
        error = (self._errors[dtype, path] / max(self._outputs[path], 1e-30)) ** 0.5
        return Option(dtype, packed.dtype, packed.nbytes, error, self._losses[dtype, path] / max(rows, 1))


@contextmanager
def _observe(model: nn.Module, paths: Sequence[str], sums: _Sums) -> Iterator[None]:
    """Add the calls of the linears to `sums` in each backward pass inside the context."""
    handles = [
        model.get_submodule(path).register_forward_hook(partial(_add_on_backward, path, sums))
        for path in paths
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _add_on_backward(
    path: str, sums: _Sums, module: nn.Module, args: tuple[Any, ...], output: Tensor
) -> Tensor:
    input, bias = args[0].detach(), module._parameters.get("bias")
    product = output.detach() if bias is None else output.detach() - bias.detach()
    # Adding a leaf gives the output a gradient even if no weight requires one.
    output = output + torch.zeros((), requires_grad=True)
    output.register_hook(lambda gradient: sums.add(path, input, product, gradient))
    return output


def _rows(output: Any, example: Example) -> tuple[Tensor, bool]:
    """Return the outputs [rows, C] without padding, and True if they are logits."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor) and logits.dim() > 1 and logits.shape[-1] > 1:
        return example.rows(logits).float(), True
    return example.rows(float_tensors_of(output)).float(), False


def float_tensors_of(output: Any) -> Tensor:
    """Return the first float tensor in `output`, with its gradient.

    Raises:
        ValueError: `output` contains no float tensor.
    """
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output
    for value in values if isinstance(values, list | tuple) or isinstance(output, Mapping) else ():
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise ValueError(
        f"the model returned a {type(output).__name__} without a float tensor: its loss cannot be measured; "
        "quantize it without --report"
    )


def _normalize(rows: Tensor, of_logits: bool) -> Tensor:
    """Return log-probabilities of logits, or rows of unit length."""
    return rows.log_softmax(-1) if of_logits else F.normalize(rows, dim=-1)


def _sampled_score(rows: Tensor, of_logits: bool, generator: torch.Generator) -> Tensor:
    """Return a scalar with random terms; the variance of its gradient is the Fisher information."""
    values = _normalize(rows, of_logits)
    if of_logits:
        labels = torch.multinomial(values.detach().exp(), 1, generator=generator)
        return values.gather(1, labels).sum()
    return (values * torch.randn(values.shape, generator=generator)).sum()
