"""Shared loop of the stages that fuse modules one by one: match each module, and replace it or report why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from hf_cpu_accel.guard.modules import instance_forward
from hf_cpu_accel.patching.hooks import is_plain
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.context import NOT_PLAIN, Context, refusal_to_swap
from hf_cpu_accel.rewrite.core.foreign_code import attempt
from hf_cpu_accel.rewrite.core.refusal import Refusal

F = TypeVar("F", bound=nn.Module)


def fuse_each(
    context: Context,
    structure: str,
    look: Callable[[nn.Module, str, Context], F | Refusal | None],
    op_and_dtype: Callable[[F, str], tuple[str, str]],
    *,
    skip_children: bool = False,
    expected: Callable[[nn.Module, str], bool] = lambda root, path: True,
) -> list[PlanItem]:
    """Replace each module of the model that `look(module, path, context)` returns a fused module for.

    Args:
        structure: the name of the structure in the plan.
        look: returns None for a module of another kind.
        op_and_dtype: returns the op and dtype of the row of a fused module, which is at a path.
        skip_children: whether to skip the modules inside of a fused one.
        expected: whether the plan reports a refusal for the module at a path of the root.
    """
    items: list[PlanItem] = []
    inside: set[int] = set()
    for path, module in list(context.root.named_modules()):
        if id(module) in inside or not context.tree.slots[id(module)]:
            continue
        fused = attempt(path, look, module, path, context)
        if isinstance(fused, Refusal):
            if expected(context.root, path):
                context.refuse(path, structure, fused)
        elif fused is not None:
            if skip_children:
                inside.update(map(id, module.modules()))
            context.swap(module, fused)
            items.append(PlanItem(path, structure, *op_and_dtype(fused, path), packed_bytes=0, reason=None))
    return items


def refusal_to_fuse(layer: nn.Module, path: str, context: Context) -> str | None:
    """Return why no op can replace this layer with all modules in it, or None if one can."""
    reason = refusal_to_swap(layer, path, context)
    if reason == NOT_PLAIN and is_plain(layer, may_collect=True):
        reason = None
    if reason is None and any(context.skipped(f"{path}.{name}") for name, _ in layer.named_modules() if name):
        reason = "skip_modules"
    if reason is None and any(instance_forward(part) is not None for part in layer.modules()):
        reason = "a module in it has a replaced forward"
    return reason
