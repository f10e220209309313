"""Find the batch norm that follows each convolution, from a call of their parent with an image, and pack the two together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.convolution.folded_norm import fold_of
from hf_cpu_accel.rewrite.convolution.geometry import is_convolution
from hf_cpu_accel.rewrite.core.context import WEIGHT_DTYPES, Context, refusal_to_swap
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.norm_fold import NormAfter
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.core.rule import Match, Outcome, Rule, apply_rule
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.rewrite.core.verify import run

# Sides of the images for a parent: most accept a small one, and whole networks halve it five times.
_SIZES = (9, 65)
_MOST_AROUND = 2


class BatchNormRule:
    """Parents of convolutions and of norms with fixed statistics, of any class.

    Each convolution whose output goes only through one such norm is packed with it, by the first of `rules` that matches it.
    """

    name = "batch norm"

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = rules

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        free = [
            (name, child) for name, child in module.named_children() if _is_free(child, name, path, context)
        ]
        convolutions = {name: child for name, child in free if is_convolution(child, nn.Conv2d)}
        others = [child for name, child in free if name not in convolutions and _has_channels(child)]
        widths = {convolution.out_channels for convolution in convolutions.values()}
        # First check for such a norm: a parent with others may be a transformer, which would run for nothing.
        folds = {
            (norm, width): fold
            for norm in others
            for width in widths
            if (fold := fold_of(norm, width)) is not None
        }
        if not folds:
            return None
        norms = [norm for norm, _ in folds]
        pairs = followers(module, list(convolutions.values()), norms, _around(module, context))
        names = {child: _join(path, name) for name, child in free}
        found = []
        for convolution, norm in pairs:
            assert isinstance(convolution, nn.Conv2d)
            fold = folds.get((norm, convolution.out_channels))
            if fold is not None:
                found.append((names[convolution], convolution, NormAfter(norm, names[norm], fold)))
        return Match(module, path, found) if found else None

    def apply(self, match: Match, context: Context) -> Outcome:
        items: list[PlanItem] = []
        handled: list[nn.Module] = []
        for path, convolution, after in match.data:
            context.norms_after[id(convolution)] = after
            for rule in self.rules:
                single = rule.match(convolution, path, context)
                if single is not None:
                    outcome = apply_rule(rule, single, context)
                    items.extend(outcome.items)
                    handled.extend(outcome.handled)
                    if outcome.handled:
                        break
        return Outcome(tuple(items), tuple(handled))


def followers(
    parent: nn.Module,
    convolutions: Sequence[nn.Module],
    norms: Sequence[nn.Module],
    around: Sequence[nn.Module] = (),
) -> list[tuple[nn.Module, nn.Module]]:
    """Return the pairs (convolution, norm) that were each called once when `parent` got an image, the norm only on the
    convolution's output.

    Args:
        around: modules that contain `parent`, for a parent that needs more than an image: the first that accepts one calls it.
    """
    for root in (parent, *around):
        found = _followers_in(root, convolutions, norms)
        if found is not None:
            return found
    return []


def _followers_in(
    root: nn.Module, convolutions: Sequence[nn.Module], norms: Sequence[nn.Module]
) -> list[tuple[nn.Module, nn.Module]] | None:
    """Return the pairs for a call of `root` with an image, or None if it does not accept one."""
    shadow = Shadow(root)
    inside = {id(module) for module in root.children()}
    of_root = [module for module in convolutions if id(module) in inside]
    first = next(module for module in root.modules() if hasattr(module, "in_channels"))
    for reader in dict.fromkeys((*of_root[:1], first)):
        for size in _SIZES:
            trace = _Trace()
            hooks = [shadow.of(module).register_forward_hook(trace.convolved) for module in convolutions]
            hooks += [shadow.of(module).register_forward_pre_hook(trace.normalizes) for module in norms]
            with shadow.running():
                output = call_foreign(run, shadow.module, _image_for(reader, convolutions[0], size))
            if not isinstance(output, Refusal):
                return [(shadow.original(one), shadow.original(other)) for one, other in trace.pairs()]
            for hook in hooks:
                hook.remove()
    return None


def _image_for(reader: Any, typical: Any, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, reader.in_channels, size, size, generator=generator).to(typical.weight.dtype)


def _around(module: nn.Module, context: Context) -> list[nn.Module]:
    """Return the modules that contain `module`, from the inside outward, without whole models."""
    found: list[nn.Module] = []
    while len(found) < _MOST_AROUND:
        parents = [parent for parent, _ in context.tree.slots[id(module)]]
        if len(parents) != 1 or parents[0] is context.root:
            break
        module = parents[0]
        found.append(module)
    return found


class _Output(LazyTensor):
    """The output of a convolution, which records its readers."""

    _given: Tensor
    read: bool

    @classmethod
    def of(cls, values: Tensor) -> _Output:
        output: _Output = cls.like(values.shape, values.dtype, values.stride())
        output._given, output.read = values, False
        return output

    def _make(self) -> Tensor:
        self.read = True
        return self._given


class _Trace:
    """The calls of convolutions and norms, and their inputs."""

    def __init__(self) -> None:
        self._outputs: list[tuple[nn.Module, _Output]] = []
        self._norms: list[tuple[nn.Module, _Output | None]] = []

    def convolved(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        marked = _Output.of(output)
        self._outputs.append((module, marked))
        return marked

    def normalizes(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        output = args[0] if len(args) == 1 and isinstance(args[0], _Output) else None
        self._norms.append((module, output))
        return args if output is None else (output._given,)

    def pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        called = [id(module) for module, _ in [*self._outputs, *self._norms]]
        found = []
        for convolution, output in self._outputs:
            norms = [norm for norm, read in self._norms if read is output]
            once = len(norms) == 1 and called.count(id(convolution)) == called.count(id(norms[0])) == 1
            if once and not output.read:
                found.append((convolution, norms[0]))
        return found


def _is_free(module: nn.Module, name: str, path: str, context: Context) -> bool:
    """Return whether the module can be replaced, and is used once."""
    if id(module) in context.tree.handled or len(context.tree.slots[id(module)]) != 1:
        return False
    return refusal_to_swap(module, _join(path, name), context) is None


def _has_channels(module: nn.Module) -> bool:
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    alike = bool(floats) and all(tensor.dim() == 1 and tensor.dtype in WEIGHT_DTYPES for tensor in floats)
    return alike and not list(module.children())


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
