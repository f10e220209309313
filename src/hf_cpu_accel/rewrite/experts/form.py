"""Match how a module stores the weights of its experts and what it computes, from its parameters, and verify it by its forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations, product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.checkpoints.stored_stack import StoredStack
from hf_cpu_accel.hosts.arguments import parameters_of
from hf_cpu_accel.ops.experts import ExpertWeights
from hf_cpu_accel.ops.linear import ACTIVATIONS
from hf_cpu_accel.packing.affine import AffineGroups
from hf_cpu_accel.packing.linear import PackedWeight, pack_affine_stack, pack_stack, unpack_linear
from hf_cpu_accel.rewrite.core.activations import identify, is_library_function
from hf_cpu_accel.rewrite.core.context import WEIGHT_DTYPES
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.tolerance import TRACED

_LARGE = 40.0  # a probe that reaches limits


@dataclass(frozen=True)
class Stack:
    """A parameter with a matrix for each expert.

    Attributes:
        transposed: whether each is [in_features, out_features].
        interleaved: whether gate and up alternate among the output features; packed, all gates come first.
    """

    name: str
    transposed: bool
    interleaved: bool = False

    def matrix(self, stack: Tensor, expert: int) -> Tensor:
        """Return [out_features, in_features], in the packed order."""
        return self.ordered(stack[expert].T if self.transposed else stack[expert])

    def ordered(self, features: Tensor) -> Tensor:
        """Return output features, the first dimension, in the packed order."""
        return torch.cat([features[::2], features[1::2]]) if self.interleaved else features

    def pack(self, stack: Tensor, dtype: str, int4_group: int) -> PackedWeight:
        if isinstance(stack, StoredStack):
            return pack_affine_stack(lambda expert: self._groups(stack, expert), len(stack))
        matrices = (self.matrix(stack, expert) for expert in range(len(stack)))
        return pack_stack(matrices, len(stack), dtype, int4_group=int4_group)

    def _groups(self, stack: StoredStack, expert: int) -> AffineGroups:
        """Return `matrix` in its stored form."""
        groups = stack.groups_of(expert)
        q, scale, offset = (self.ordered(part) for part in (groups.q, groups.scale, groups.offset))
        return AffineGroups(q, scale, offset, groups.bits, groups.group)

    def pack_bias(self, bias: Tensor | None) -> Tensor | None:
        """Return the parameter [experts, out_features] as [experts * out_features]."""
        return None if bias is None else torch.cat([self.ordered(row) for row in bias.detach()])

    def unpack(self, packed: PackedWeight, experts: int, dtype: torch.dtype) -> Tensor:
        """Return the parameter, up to the rounding of packing."""
        rows, columns = packed.out_features // experts, packed.in_features
        shape = (columns, rows) if self.transposed else (rows, columns)
        stack = torch.empty((experts, *shape), dtype=dtype)
        for expert in range(experts):
            values = unpack_linear(packed.narrow(expert * rows, rows))
            if self.interleaved:
                values = torch.stack(values.chunk(2), dim=1).flatten(0, 1)
            stack[expert] = values.T if self.transposed else values
        return stack


@dataclass(frozen=True)
class ExpertsForm:
    """The form of an experts module; see `ops.experts.ExpertWeights`.

    Attributes:
        up, down: the parameters [experts, ...].
        up_bias, down_bias: names of the parameters [experts, out_features], or None.
        inputs: names of the parameters of its forward: hidden states, expert indices, expert weights.
    """

    up: Stack
    down: Stack
    up_bias: str | None
    down_bias: str | None
    activation: str
    gated: bool
    limit: float
    inputs: tuple[str, ...]

    def stacks(self) -> tuple[Stack, Stack]:
        return self.up, self.down

    def weights(self, up: PackedWeight, down: PackedWeight, module: nn.Module, experts: int) -> ExpertWeights:
        """Return the weights for the op; `module` has the biases."""
        biases = [
            stack.pack_bias(None if name is None else module.get_parameter(name))
            for stack, name in ((self.up, self.up_bias), (self.down, self.down_bias))
        ]
        return ExpertWeights(experts, up, biases[0], down, biases[1], self.activation, self.gated, self.limit)


def holds_experts(module: nn.Module) -> bool:
    """Return whether `module` itself has an up and a down projection for each of some experts, by their shapes.

    Other parameters may have three dimensions, too: learned tokens [1, 1, C], kernels of convolutions and their gains.
    """
    stacks = {name: p for name, p in module.named_parameters(recurse=False) if p.dim() == 3 and p.numel()}
    return any(True for _ in _chains(stacks))


def read_experts(module: nn.Module) -> ExpertsForm | None:
    """Return the form of `module`, or None if it is no module of experts that the op supports."""
    parameters: dict[str, Tensor] = dict(module.named_parameters())
    stacks = {name: p for name, p in parameters.items() if p.dim() == 3 and p.numel()}
    inputs = tuple(parameters_of(module.forward))
    if len(stacks) != 2 or len(inputs) != 3 or any(True for _ in module.buffers()):
        return None
    count, dtype = len(next(iter(stacks.values()))), next(iter(stacks.values())).dtype
    if dtype not in WEIGHT_DTYPES or any(len(p) != count or p.dtype != dtype for p in parameters.values()):
        return None
    for form in _layouts(parameters, stacks, inputs):
        verified = _verify(module, parameters, form)
        if verified is not None:
            return verified
    return None


def _layouts(
    parameters: dict[str, Tensor], stacks: dict[str, Tensor], inputs: tuple[str, ...]
) -> Iterator[ExpertsForm]:
    """Yield the forms that match the shapes, without the activation."""
    biases = {name: p for name, p in parameters.items() if p.dim() == 2}
    if len(stacks) + len(biases) != len(parameters) or len(biases) not in (0, 2):
        return
    for up, down, transposed in _chains(stacks):
        rows, columns = _sizes(stacks[up], transposed)
        choices: list[tuple[str | None, str | None]] = [(None, None)]
        if biases:
            first, second = biases
            choices = [
                pair
                for pair in ((first, second), (second, first))
                if (biases[pair[0]].shape[1], biases[pair[1]].shape[1]) == (rows, columns)
            ]
        gated = rows != _sizes(stacks[down], transposed)[1]
        for (up_bias, down_bias), interleaved in product(choices, (False, True) if gated else (False,)):
            yield ExpertsForm(
                Stack(up, transposed, interleaved),
                Stack(down, transposed),
                up_bias,
                down_bias,
                "none",
                gated,
                0.0,
                inputs,
            )


def _chains(stacks: Mapping[str, Tensor]) -> Iterator[tuple[str, str, bool]]:
    """Yield (up, down, whether they are transposed): stacks of one length whose sizes allow up and then down."""
    for (up, down), transposed in product(permutations(stacks, 2), (False, True)):
        rows, columns = _sizes(stacks[up], transposed)
        features, intermediate = _sizes(stacks[down], transposed)
        same = len(stacks[up]) == len(stacks[down]) and features == columns
        if same and rows in (intermediate, 2 * intermediate):
            yield up, down, transposed


def _sizes(stack: Tensor, transposed: bool) -> tuple[int, int]:
    """Return output and input features of each matrix."""
    _, rows, columns = stack.shape
    return (columns, rows) if transposed else (rows, columns)


def _verify(module: nn.Module, parameters: dict[str, Tensor], form: ExpertsForm) -> ExpertsForm | None:
    """Return the form with the activation and the limit that agree with `module`, or None."""
    up = parameters[form.up.name].detach()
    experts, dtype = len(up), up.dtype
    features = up.shape[1] if form.up.transposed else up.shape[2]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, features, generator=generator)
    x[3:] *= _LARGE
    top_k = min(2, experts)
    index = torch.rand(len(x), experts, generator=generator).topk(top_k).indices
    weights = torch.rand(len(x), top_k, generator=generator)
    x, weights = x.to(dtype), weights.to(dtype)
    with torch.no_grad():
        output = call_foreign(module.forward, x, index, weights)
        if not isinstance(output, Tensor):
            return None
        product_of = _products(parameters, form, index)
        raw = product_of(form.up, form.up_bias, x.float()[:, None].expand(-1, top_k, -1))
        numbers = [value for value in vars(module).values() if isinstance(value, float) and value > 0]
        limits = [0.0, *numbers] if form.gated else [0.0]
        for activation, limit in product(_activations(module), limits):
            hidden = _activated(raw, activation, form.gated, limit)
            made = product_of(form.down, form.down_bias, hidden)
            expected = (made * weights[..., None].float()).sum(dim=1)
            if compare(output, expected).within(TRACED.of(dtype)):
                return ExpertsForm(
                    form.up,
                    form.down,
                    form.up_bias,
                    form.down_bias,
                    activation,
                    form.gated,
                    limit,
                    form.inputs,
                )
    return None


def _products(
    parameters: dict[str, Tensor], form: ExpertsForm, index: Tensor
) -> Callable[[Stack, str | None, Tensor], Tensor]:
    """Return a function (stack, bias, x [T, k, K]) -> [T, k, N], each row by the matrix of its expert."""

    def multiply(stack: Stack, bias: str | None, x: Tensor) -> Tensor:
        rows = []
        for row, expert in zip(x.flatten(0, 1), index.flatten().tolist(), strict=True):
            added = None if bias is None else stack.ordered(parameters[bias][expert]).float()
            rows.append(F.linear(row, stack.matrix(parameters[stack.name].detach(), expert).float(), added))
        return torch.stack(rows).unflatten(0, index.shape)

    return multiply


def _activated(raw: Tensor, activation: str, gated: bool, limit: float) -> Tensor:
    if not gated:
        return ACTIVATIONS[activation](raw)
    gate, up = raw.chunk(2, dim=-1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
    return ACTIVATIONS[activation](gate) * up


def _activations(module: nn.Module) -> list[str]:
    """Return the activations that the module holds, or all."""
    held = [
        *module.children(),
        *(v for n, v in vars(module).items() if not n.startswith("_") and is_library_function(v)),
    ]
    names = [name for name in map(identify, held) if name is not None]
    return names or [name for name in ACTIVATIONS if name != "none"]
