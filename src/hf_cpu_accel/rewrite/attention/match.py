"""Give attention modules that use the attention interface of transformers the attention of this package, by a copied config."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.hosts.arguments import NATIVE_ATTENTION, STOCK_ATTENTION
from hf_cpu_accel.hosts.models import pretrained_models
from hf_cpu_accel.patching.restore import Journal, SwappedAttribute
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.tolerance import PACKED

STRUCTURE = "attention"
_IMPLEMENTATION = "_attn_implementation_internal"
_FIELDS = frozenset({_IMPLEMENTATION, "_attn_implementation"})


class AlsoSdpa(str):
    """The name of this package's attention for models that check for "sdpa", and compute something else otherwise."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or (
            isinstance(other, str) and str.__eq__(STOCK_ATTENTION, other)
        )

    def __ne__(self, other: object) -> bool:
        return not self == other


@dataclass(frozen=True)
class SwappedConfig(SwappedAttribute):
    """A change: a config with this package's attention. After unpickling, the name is registered with transformers again."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        from hf_cpu_accel.rewrite.attention.interface import register

        register()
        self.__dict__.update(state)


class AttentionRule:
    """Swap configs instead of modules: the implementation is a field of the model's config, which other models may share.

    So the modules of the accelerated model get copies of their configs, one copy for each shared one, and `restore` sets the
    originals again. Only `"sdpa"` is replaced: eager attention may have been chosen for its attention weights.
    """

    name = "attention"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        if not dispatches(module):
            return None
        return Match(module, path, _unsupported_reason(module, path, context))

    def apply(self, match: Match, context: Context) -> Outcome:
        from hf_cpu_accel.rewrite.attention.interface import register

        config = vars(match.module).get("config")
        if config is not None and getattr(config, "_attn_implementation", None) == NATIVE_ATTENTION:
            return Outcome((_item(match.path),), ())
        reason = match.data or (_verify(match.module) if context.config.verify else None)
        if reason is not None:
            return Outcome((PlanItem.left(match.path, STRUCTURE, reason),), ())
        register()
        assert config is not None
        replacements = _copy_configs(context.root, config)
        for original, replacement in replacements:
            if original is config:
                vars(replacement)[_IMPLEMENTATION] = (
                    AlsoSdpa(NATIVE_ATTENTION) if _asks_for_name(context.root) else NATIVE_ATTENTION
                )
        _swap_configs(context.root, replacements, context.journal)
        return Outcome((_item(match.path),), ())


def _item(path: str) -> PlanItem:
    return PlanItem(path, STRUCTURE, "attention", "float32", packed_bytes=0, reason=None)


def dispatches(module: nn.Module) -> bool:
    """Return whether the forward of `module` uses transformers' `ALL_ATTENTION_FUNCTIONS`."""
    if not pretrained_models() or isinstance(module, torch.jit.ScriptModule):
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _asks_for_name(root: nn.Module) -> bool:
    """Return whether a method of a module in `root` compares the implementation with "sdpa", as sparse attention of
    DeepSeek-V3.2 does."""
    classes = {cls for module in root.modules() for cls in type(module).__mro__}
    return any(_compares(cls) for cls in classes if cls.__module__.startswith("transformers.models."))


@cache
def _compares(cls: type) -> bool:
    methods = [inspect.unwrap(member) for member in vars(cls).values() if inspect.isfunction(member)]
    codes = [method.__code__ for method in methods]
    return any(
        not _FIELDS.isdisjoint(code.co_names)
        and any(
            STOCK_ATTENTION in (constant if isinstance(constant, tuple) else (constant,))
            for constant in code.co_consts
        )
        for code in codes
    )


def _unsupported_reason(module: nn.Module, path: str, context: Context) -> str | None:
    config = vars(module).get("config")
    implementation = getattr(config, "_attn_implementation", None)
    if context.skipped(path):
        return "skip_modules"
    if implementation not in (STOCK_ATTENTION, NATIVE_ATTENTION):
        return f"attn_implementation={implementation!r} is not supported, only {STOCK_ATTENTION!r}"
    if getattr(config, "output_attentions", False):
        return "output_attentions=True needs attention weights"
    return None


def _verify(module: nn.Module) -> str | None:
    """Return the difference of attention from that of transformers on padded input, with the head size of `module`, or None."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from hf_cpu_accel.rewrite.attention.interface import attention_forward

    sizes = (
        getattr(module, name, None) for name in ("head_dim", "attention_head_size", "key_value_proj_dim")
    )
    head_size = next((size for size in sizes if isinstance(size, int)), 64)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, 5, head_size, generator=generator) for _ in range(3))
    padding = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])[:, None, None].expand(2, 1, 5, 5)
    caller = SimpleNamespace(is_causal=False)
    with torch.no_grad():
        ours = attention_forward(caller, query, key, value, padding)[0]  # type: ignore[arg-type]
        theirs = sdpa_attention_forward(caller, query, key, value, padding)[0]  # type: ignore[arg-type]
    return compare(ours, theirs).reason(PACKED.float32)


def _copy_configs(root: nn.Module, target: Any) -> list[tuple[Any, Any]]:
    """Return copies of all configs that hold `target` or are it, as (original, copy) pairs that refer to one another."""
    from transformers import PreTrainedConfig

    found: dict[int, Any] = {}

    def visit(config: Any) -> bool:
        if id(config) in found:
            return True
        holds = config is target
        for part in vars(config).values():
            if isinstance(part, PreTrainedConfig):
                holds |= visit(part)
        if holds:
            found[id(config)] = config
        return holds

    for module in root.modules():
        for value in vars(module).values():
            if isinstance(value, PreTrainedConfig):
                visit(value)
    copies = {key: copy.copy(config) for key, config in found.items()}
    for duplicate in copies.values():
        for name, value in list(vars(duplicate).items()):
            if id(value) in copies:
                vars(duplicate)[name] = copies[id(value)]
    return [(config, copies[key]) for key, config in found.items()]


def _swap_configs(root: nn.Module, replacements: list[tuple[Any, Any]], journal: Journal) -> None:
    by_id = {id(original): replacement for original, replacement in replacements}
    before = {id(original): dict(vars(replacement)) for original, replacement in replacements}
    for module in root.modules():
        for name, value in list(vars(module).items()):
            replacement = by_id.get(id(value))
            if replacement is None:
                continue
            ours = {_IMPLEMENTATION: NATIVE_ATTENTION}
            change = SwappedConfig(module, name, value, replacement, ours, before[id(value)])
            journal.record(change)
            setattr(module, name, replacement)
