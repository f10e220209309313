"""Linears that are split over processes: the part of this process becomes a plain linear, which the rules pack, inside of a
module that joins the parts.

Some output features of queries, keys, values and of an FFN's first linears stay with their process, and the linear after them
sums over all processes: Shoeybi et al. 2019, arXiv:1909.08053, section 3. The plan of transformers decides which linears.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import skip_init

from hf_cpu_accel.hosts.tensor_parallel import Division, Share, part_of, share_of
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.model_tree import Weights
from hf_cpu_accel.runtime.exchange import Exchange

# Reason why a layer is not fused.
BETWEEN = "sums over processes run between its parts: its parts run separately"


class JoinedLinear(nn.Module):
    """A linear whose output is the sum of the parts of all processes, or their output features side by side: [..., in_features
    of this process] -> [..., out_features].

    Attributes:
        part: the part of this process; without the bias where parts are summed.
    """

    bias: nn.Parameter | None

    def __init__(
        self, part: nn.Linear, bias: nn.Parameter | None, share: Share, exchange: Exchange, out_features: int
    ) -> None:
        super().__init__()
        self.part = part
        self.register_parameter("bias", bias)
        self.share = share
        self.exchange = exchange
        self.out_features = out_features
        self.training = False

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.part(input)
        if self.share.joint == "concatenate":
            # The last process may have fewer features than the others.
            missing = -(-self.out_features // self.share.size) - output.shape[-1]
            whole = self.exchange.side_by_side(nn.functional.pad(output, (0, missing)))
            return whole[..., : self.out_features]
        output = self.exchange.sum(output)
        return output if self.bias is None else output + self.bias

    def extra_repr(self) -> str:
        return f"out_features={self.out_features}, processes={self.share.size}, joint={self.share.joint}"


@dataclass(frozen=True)
class TakenParts:
    """A change in the journal: the parameters of `linear` were divided; the parts of this process are in `parts` since, under
    the same names."""

    linear: nn.Linear
    divisions: Mapping[str, Division]
    parts: Mapping[str, nn.Parameter]

    def undo(self) -> None:
        for name, division in self.divisions.items():
            if self.linear._parameters[name] is None:
                self.linear._parameters[name] = division.parameter(self.parts[name])


def divide_linears(context: Context) -> None:
    """Replace linears that are split over processes by plain ones. Call it before all other stages, since it changes the
    modules."""
    sizes: set[int] = set()
    exchanges: dict[Any, Exchange] = {}
    for path, linear in context.tree.modules:
        share = share_of(context.root, path, linear)
        if share is None or not context.tree.slots[id(linear)] or context.skipped(path):
            continue
        assert isinstance(linear, nn.Linear)
        sizes.add(share.size)
        parts = {name: part_of(parameter) for name, parameter in linear.named_parameters(recurse=False)}
        plain = _linear(parts, has_bias=share.joint != "sum")
        replacement: nn.Module = plain
        if share.joint != "none":
            bias = parts.get("bias") if share.joint == "sum" else None
            if share.group not in exchanges:
                exchanges[share.group] = Exchange(share.group)
            replacement = JoinedLinear(plain, bias, share, exchanges[share.group], linear.out_features)
            context.tree.slots[id(plain)] = [(replacement, "part")]
        context.swap(linear, replacement)
        context.tree.slots[id(replacement)] = context.tree.slots[id(linear)]
        if not context.weights.is_tied(linear.weight):  # a tied weight is still to be divided elsewhere
            _take_parts(linear, parts, context)
    if sizes:
        context.tree.modules = list(context.root.named_modules())
        context.weights = Weights(context.root)
        shared = all(exchange.is_shared for exchange in exchanges.values())
        how = "through shared memory" if shared else "by gloo"
        context.results.notes.append(
            f"tensor parallelism: the linears are split over {max(sizes)} processes and joined {how}"
        )


def is_joined(module: nn.Module) -> bool:
    """Return whether other processes compute a part of `module`."""
    return any(isinstance(child, JoinedLinear) for child in module.modules())


def _linear(parts: Mapping[str, nn.Parameter], *, has_bias: bool) -> nn.Linear:
    out_features, in_features = parts["weight"].shape
    linear: nn.Linear = skip_init(nn.Linear, in_features, out_features, bias=False)
    linear.weight = parts["weight"]
    linear.register_parameter("bias", parts.get("bias") if has_bias else None)
    return linear.eval()


def _take_parts(linear: nn.Linear, parts: Mapping[str, nn.Parameter], context: Context) -> None:
    """Free the memory of `linear` until its parameters are restored."""
    divisions = {name: Division.of(parameter) for name, parameter in linear.named_parameters(recurse=False)}
    context.journal.record(TakenParts(linear, divisions, parts))
    for name in divisions:
        linear._parameters[name] = None
