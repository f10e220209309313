"""Containers around one linear: its activation, residual and norm join it in one or two ops."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.ops.linear import ACTIVATIONS
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.providers.route import Route
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.rewrite.linear.container import FusedContainer
from hf_cpu_accel.rewrite.linear.dispatch import LinearWork
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.linear.match import pack, packed_item, release
from hf_cpu_accel.rewrite.linear.parts import Parts, computes, plain_linear, probes, take_apart
from hf_cpu_accel.rewrite.norm.match import NormSpec
from hf_cpu_accel.tolerance import PACKED


@dataclass(frozen=True)
class Block:
    """norm(activation(linear(x)) + residual), with the parts that are present.

    Attributes:
        dense: name of the linear in its container.
        first_token: only x[:, 0] is used, as in the poolers of BERT-like models.
    """

    dense: str
    first_token: bool
    activation: str
    residual: bool
    norm: tuple[str, NormSpec] | None

    @property
    def structure(self) -> str:
        parts = ["linear"]
        parts += ["activation"] if self.activation != "none" else []
        parts += ["residual"] if self.residual else []
        parts += ["norm"] if self.norm is not None else []
        return ("first token: " if self.first_token else "") + " + ".join(parts)


class FusedLinearBlock(FusedContainer):
    """A `Block` on the fused ops: x [..., in_features] and, if the block has one, the residual [..., out_features]."""

    def __init__(
        self, original: nn.Module, dense: PackedLinear, block: Block, inputs: tuple[str, ...]
    ) -> None:
        super().__init__(original, {block.dense: dense}, inputs)
        self.block = block
        self.provider_route = self.make_route()

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        if self.is_watched:
            return self._original_class.forward(self, *args, **kwargs)
        input, *rest = self.bind(args, kwargs)
        for tensor in (input, *rest):
            check_inference(self, tensor)
        if self.block.first_token:
            input = input[:, 0]
        output = self.provider_route(input, *rest)
        if self.block.norm is None:
            return output
        name, spec = self.block.norm
        norm = self._modules[name]
        assert norm is not None
        return spec.compute(norm, output)

    def make_route(self) -> Route:
        dense = self.packed_child(self.block.dense)
        part = dense.group.part(dense.index, dense.index)
        work = LinearWork(part, self.block.activation, residual=self.block.residual)
        return Route(work, measured=dense.group.measured)

    def extra_repr(self) -> str:
        return self.block.structure


class LinearBlockRule:
    """BERT's intermediate, (self-)output, pooler and prediction head, and modules of the same structure."""

    name = "linear block"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        parts = take_apart(module, path, context)
        if parts is None or len(parts.linears) != 1:
            return None
        inputs = probes(parts.linears[0][1], len(parts.inputs)) if len(parts.inputs) <= 2 else ()
        for block in _candidates(parts):
            if computes(module, inputs, _reference(block, module, inputs)):
                return Match(module, path, (block, parts.inputs))
        return None

    def apply(self, match: Match, context: Context) -> Outcome:
        block, input_names = match.data
        original = match.module.get_submodule(block.dense)
        assert isinstance(original, nn.Linear)
        dtype = context.dtypes.of_weight(f"{match.path}.{block.dense}", [original])
        group = context.config.int4_group
        dense = pack([original], dtype, int4_group=group, measured=context.measured)[0]
        fused = FusedLinearBlock(match.module, dense, block, input_names)
        if context.verifies:
            inputs = probes(original, len(input_names))
            with torch.no_grad():
                reason = compare(fused(*inputs), match.module(*inputs)).reason(
                    PACKED.of(dtype, original.weight.dtype)
                )
            if reason is not None:
                return Outcome((PlanItem.left(match.path, block.structure, reason),), ())
        context.swap(match.module, fused)
        release(original, dense, context)
        op = "linear" if block.norm is None else f"linear, {block.norm[1].kind}"
        item = packed_item(match.path, block.structure, op, dense)
        return Outcome((item,), tuple(match.module.modules()))


def _candidates(parts: Parts) -> list[Block]:
    """Return the possible blocks of a container with these parts; none if nothing can be fused with the linear."""
    name = parts.linears[0][0]
    activation, norm = parts.activation, parts.norm
    if len(parts.inputs) == 2:
        return [Block(name, False, activation, True, norm)]
    if len(parts.inputs) != 1 or (activation == "none" and norm is None):
        return []
    return [Block(name, first_token, activation, False, norm) for first_token in (False, True)]


def _reference(block: Block, module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor | None:
    """Return the output of `block` in plain torch, or None."""
    dense = module.get_submodule(block.dense)
    assert isinstance(dense, nn.Linear)
    input = inputs[0][:, 0] if block.first_token else inputs[0]
    output = ACTIVATIONS[block.activation](plain_linear(dense, input))
    if block.residual:
        output = output + inputs[1]
    if block.norm is None:
        return output
    name, spec = block.norm
    norm = module.get_submodule(name)
    fits = all(parameter.shape == output.shape[-1:] for parameter in norm.parameters(recurse=False))
    return spec.reference(norm, output) if fits else None
