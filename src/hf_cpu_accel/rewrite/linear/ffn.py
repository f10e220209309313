"""Containers around two linears with an activation between them: one op, and no intermediate tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.ops.linear import ACTIVATIONS
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.providers.route import Route
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.dtype_table import coarsest
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.rewrite.linear.container import FusedContainer
from hf_cpu_accel.rewrite.linear.dispatch import FFNWork
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.linear.match import pack, packed_item, release
from hf_cpu_accel.rewrite.linear.parts import computes, plain_linear, probes, take_apart
from hf_cpu_accel.tolerance import PACKED

STRUCTURE = "ffn"


@dataclass(frozen=True)
class FeedForward:
    """down(activation(up(x))): the names of the two linears in their container, and of the input of its forward."""

    up: str
    down: str
    activation: str
    input: str


class FusedFFN(FusedContainer):
    """`ops.ffn` in place of a feed-forward module: [..., K] -> [..., N]."""

    def __init__(
        self, original: nn.Module, up: PackedLinear, down: PackedLinear, feed_forward: FeedForward
    ) -> None:
        packed = {feed_forward.up: up, feed_forward.down: down}
        super().__init__(original, packed, (feed_forward.input,))
        self.feed_forward = feed_forward
        self.provider_route = self.make_route()

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        if self.is_watched:
            return self._original_class.forward(self, *args, **kwargs)
        (input,) = self.bind(args, kwargs)
        check_inference(self, input)
        return self.provider_route(input)

    def make_route(self) -> Route:
        up, down = self.packed_child(self.feed_forward.up), self.packed_child(self.feed_forward.down)
        up_part, down_part = (linear.group.part(linear.index, linear.index) for linear in (up, down))
        return Route(FFNWork(up_part, down_part, self.feed_forward.activation), measured=up.group.measured)

    def extra_repr(self) -> str:
        return f"activation={self.feed_forward.activation}"


class FFNRule:
    """Feed-forward modules of T5 and DistilBERT, and modules of the same structure."""

    name = "ffn"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        parts = take_apart(module, path, context)
        if parts is None or len(parts.linears) != 2 or parts.norm is not None or len(parts.inputs) != 1:
            return None
        for (up_name, up), (down_name, down) in (parts.linears, parts.linears[::-1]):
            if up.out_features != down.in_features or up.weight.dtype != down.weight.dtype:
                continue
            inputs = probes(up, 1)
            hidden = ACTIVATIONS[parts.activation](plain_linear(up, inputs[0]))
            if computes(module, inputs, plain_linear(down, hidden)):
                return Match(module, path, FeedForward(up_name, down_name, parts.activation, parts.inputs[0]))
        return None

    def apply(self, match: Match, context: Context) -> Outcome:
        found: FeedForward = match.data
        up, down = match.module.get_submodule(found.up), match.module.get_submodule(found.down)
        assert isinstance(up, nn.Linear)
        assert isinstance(down, nn.Linear)
        dtypes = [context.dtypes.at(f"{match.path}.{name}") for name in (found.up, found.down)]
        packed_up, packed_down = (
            pack([linear], dtype, int4_group=context.config.int4_group, measured=context.measured)[0]
            for linear, dtype in zip((up, down), dtypes, strict=True)
        )
        fused = FusedFFN(match.module, packed_up, packed_down, found)
        if context.verifies:
            inputs = probes(up, 1)
            with torch.no_grad():
                reason = compare(fused(*inputs), match.module(*inputs)).reason(
                    PACKED.of(coarsest(dtypes), up.weight.dtype)
                )
            if reason is not None:
                return Outcome((PlanItem.left(match.path, STRUCTURE, reason),), ())
        context.swap(match.module, fused)
        items = []
        for name, linear, packed in ((found.up, up, packed_up), (found.down, down, packed_down)):
            release(linear, packed, context)
            items.append(packed_item(f"{match.path}.{name}", STRUCTURE, "ffn", packed))
        return Outcome(tuple(items), tuple(match.module.modules()))
