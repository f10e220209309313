"""The work of packed linears for `providers.Route`: the op of this package, and the same by another provider's linear and torch
ops."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_cpu_accel.ops.ffn import ffn, gated_ffn
from hf_cpu_accel.ops.linear import ACTIVATIONS, linear, linear_split
from hf_cpu_accel.packing.linear import PackedWeight
from hf_cpu_accel.providers.choice import Run
from hf_cpu_accel.providers.copies import Copies
from hf_cpu_accel.providers.torch_ops import Provider


@dataclass
class Part:
    """Some output features of a packed weight, their bias, and the copies of other providers.

    `permutation`: the input features in the order of the weight, or None. Code that fuses a part with an earlier op needs it. A
    part is shared by all users of these features, and `bias` is replaced when the model is cast.
    """

    packed: PackedWeight
    bias: Tensor | None
    permutation: Tensor | None = None
    copies: Copies = field(init=False)

    def __post_init__(self) -> None:
        self.copies = Copies(self.packed)

    def by(self, provider: Provider) -> Run:
        """Return a function that computes input @ weight^T + bias."""
        weight = self.copies.of(provider)
        return lambda input: weight.multiply(self.permuted(input), self.bias)

    def permuted(self, input: Tensor) -> Tensor:
        """Return features [..., in_features] in the order of the weight."""
        return input if self.permutation is None else input.index_select(-1, self.permutation)

    @property
    def shape(self) -> str:
        return f"{self.packed.out_features}x{self.packed.in_features}"

    @property
    def products(self) -> int:
        return self.packed.out_features * self.packed.in_features


class LinearWork:
    """activation(linear(input)) + residual."""

    def __init__(self, part: Part, activation: str = "none", *, residual: bool = False) -> None:
        self.part = part
        self.activation = activation
        self.residual = residual
        self.dtype = part.packed.dtype
        self.in_features = part.packed.in_features
        self.products = part.products
        extras = [activation] if activation != "none" else []
        extras += ["residual"] if residual else []
        self.key = "+".join(["linear", *extras]) + f" {part.shape} {self.dtype}"

    def own(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        part = self.part
        return linear(
            part.permuted(input), part.packed, part.bias, activation=self.activation, residual=residual
        )

    def by(self, provider: Provider) -> Run:
        multiply, activate = self.part.by(provider), ACTIVATIONS[self.activation]

        def run(input: Tensor, residual: Tensor | None = None) -> Tensor:
            output = activate(multiply(input))
            return output if residual is None else (output + residual).to(input.dtype)

        return run

    def sample(self, rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        shapes = [(rows, self.in_features)] + [(rows, self.part.packed.out_features)] * self.residual
        return sample(shapes, dtype)


class RunWork:
    """Several members on one input: one GEMM of this package with an output for each, or one product each by others."""

    def __init__(self, whole: Part, members: list[Part]) -> None:
        self.whole = whole
        self.members = members
        self.sizes = [member.packed.out_features for member in members]
        self.dtype = whole.packed.dtype
        self.in_features = whole.packed.in_features
        self.products = whole.products
        self.key = f"split {','.join(map(str, self.sizes))}x{self.in_features} {self.dtype}"

    def own(self, input: Tensor) -> list[Tensor]:
        whole = self.whole
        return linear_split(whole.permuted(input), whole.packed, whole.bias, self.sizes)

    def by(self, provider: Provider) -> Run:
        runs = [member.by(provider) for member in self.members]
        return lambda input: [run(input) for run in runs]

    def sample(self, rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return sample([(rows, self.in_features)], dtype)


class FFNWork:
    """down(activation(up(input))) + residual."""

    def __init__(self, up: Part, down: Part, activation: str, *, residual: bool = False) -> None:
        self.up = up
        self.down = down
        self.activation = activation
        self.residual = residual
        self.dtype = _dtype_of_both(up, down)
        self.in_features = up.packed.in_features
        self.products = up.products + down.products
        extras = "+".join(["ffn", activation] + ["residual"] * residual)
        self.key = f"{extras} {up.shape},{down.shape} {self.dtype}"

    def own(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        up, down, activation = self.up, self.down, self.activation
        return ffn(
            input, up.packed, up.bias, down.packed, down.bias, activation=activation, residual=residual
        )

    def by(self, provider: Provider) -> Run:
        up, down, activate = self.up.by(provider), self.down.by(provider), ACTIVATIONS[self.activation]

        def run(input: Tensor, residual: Tensor | None = None) -> Tensor:
            output = down(activate(up(input)))
            return output if residual is None else (output + residual).to(input.dtype)

        return run

    def sample(self, rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        shapes = [(rows, self.in_features)] + [(rows, self.down.packed.out_features)] * self.residual
        return sample(shapes, dtype)


class GatedFFNWork:
    """down(activation(gate) * value) + residual, where gate and value are the halves of up(input)."""

    def __init__(
        self, up: Part, down: Part, activation: str, *, gate_last: bool, residual: bool = False
    ) -> None:
        self.up = up
        self.down = down
        self.activation = activation
        self.gate_last = gate_last
        self.residual = residual
        self.dtype = _dtype_of_both(up, down)
        self.in_features = up.packed.in_features
        self.products = up.products + down.products
        extras = "+residual" if residual else ""
        self.key = f"gated ffn+{activation}{extras} {up.shape},{down.shape} {self.dtype}"

    def own(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        up, down, activation = self.up, self.down, self.activation
        return gated_ffn(
            input,
            up.packed,
            up.bias,
            down.packed,
            down.bias,
            activation=activation,
            residual=residual,
            gate_last=self.gate_last,
        )

    def by(self, provider: Provider) -> Run:
        up, down, activate = self.up.by(provider), self.down.by(provider), ACTIVATIONS[self.activation]

        def run(input: Tensor, residual: Tensor | None = None) -> Tensor:
            gate, value = up(input).chunk(2, dim=-1)[:: -1 if self.gate_last else 1]
            output = down(activate(gate) * value)
            return output if residual is None else (output + residual).to(input.dtype)

        return run

    def sample(self, rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        shapes = [(rows, self.in_features)] + [(rows, self.down.packed.out_features)] * self.residual
        return sample(shapes, dtype)


def _dtype_of_both(up: Part, down: Part) -> str:
    """Return the dtype of both, or a name that no other provider supports if they differ."""
    first, second = up.packed.dtype, down.packed.dtype
    return first if first == second else f"{first}+{second}"


def sample(shapes: list[tuple[int, int]], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return random numbers in [-1, 1), without using torch's global generator."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.empty(shape).uniform_(-1, 1, generator=generator).to(dtype) for shape in shapes)
