"""What stages that fuse modules one by one have in common: look at each, put what was made in its place, or say why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from hf_cpu_accel.patching.hooks import instance_forward, is_plain
from hf_cpu_accel.patching.restore import swap_module
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
    """Swap each module of the model for what `look(module, path, context)` makes of it.

    Args:
        structure: what is looked for, in words of the plan.
        look: gives None for a module of another kind.
        op_and_dtype: of what was made at a path, for its row.
        skip_children: whether to skip the modules inside of a fused one.
        expected: whether the plan says why the module at a path of the root was refused: where one looks for such a structure.
    """
    items: list[PlanItem] = []
    inside: set[int] = set()
    for path, module in list(context.root.named_modules()):
        if id(module) in inside or not context.slots[id(module)]:
            continue
        fused = attempt(path, look, module, path, context)
        if isinstance(fused, Refusal):
            if expected(context.root, path):
                context.refuse(path, structure, fused)
        elif fused is not None:
            if skip_children:
                inside.update(map(id, module.modules()))
            swap_module(context.journal, context.slots[id(module)], fused)
            items.append(PlanItem(path, structure, *op_and_dtype(fused, path), packed_bytes=0, reason=None))
    return items


def refusal_to_fuse(layer: nn.Module, path: str, context: Context) -> str | None:
    """Why no op takes the place of this layer and of all that is in it, or None if one can."""
    reason = refusal_to_swap(layer, path, context)
    if reason == NOT_PLAIN and is_plain(layer, may_collect=True):
        reason = None
    if reason is None and any(context.skipped(f"{path}.{name}") for name, _ in layer.named_modules() if name):
        reason = "skip_modules"
    if reason is None and any(instance_forward(part) is not None for part in layer.modules()):
        reason = "a module in it has a replaced forward"
    return reason
