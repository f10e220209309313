"""Which layers of an accelerated model run as one call, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from hf_cpu_accel.plan import Plan
from hf_cpu_accel.rewrite.core.refusal import LAYERS, RECORDED

# As many as attention has: a member of a list with fewer is no layer of a transformer.
_FEWEST_LINEARS = 4


@dataclass(frozen=True)
class Layers:
    """Members of one list that are alike.

    Attributes:
        path: of the list.
        kind: their class.
        count: how many of them the list has.
        runs_as: the structure that was recognized, None if they run in parts.
        reasons: why, if they run in parts.
    """

    path: str
    kind: str
    count: int
    runs_as: str | None
    reasons: tuple[str, ...]


def members(model: nn.Module) -> dict[str, str]:
    """{path: class} of what is in lists of layers and of transformers' size; of stages that hold such lists, what is in those.
    To be called before the model is accelerated."""
    found: dict[str, str] = {}
    for path, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            for number, member in child.named_children():
                inner = {} if _are_parts(member) else members(member)
                if not inner and _linears(member) >= _FEWEST_LINEARS:
                    inner = {"": type(member).__name__}
                found |= {f"{path}.{number}.{name}".rstrip("."): kind for name, kind in inner.items()}
        else:
            found |= {f"{path}.{name}": kind for name, kind in members(child).items()}
    return found


def _are_parts(member: nn.Module) -> bool:
    """Whether what it holds in lists is of several classes, as the parts of T5's layers are, and not layers of one."""
    lists = [child for child in member.children() if isinstance(child, nn.ModuleList)]
    return any(len({type(part) for part in parts}) > 1 for parts in lists)


def layers(kinds: Mapping[str, str], plan: Plan) -> list[Layers]:
    """In the model's order.

    Args:
        kinds: what `members` said.
        plan: what `explain` says of the accelerated model.
    """
    told: dict[tuple[str, str, str | None, tuple[str, ...]], int] = {}
    for path, kind in kinds.items():
        key = (path.rpartition(".")[0], kind, *_outcome(path, plan))
        told[key] = told.get(key, 0) + 1
    return [Layers(path, kind, count, *outcome) for (path, kind, *outcome), count in told.items()]  # type: ignore[arg-type]


def _outcome(path: str, plan: Plan) -> tuple[str | None, tuple[str, ...]]:
    rows = [item for item in plan.items if item.structure in LAYERS and item.name in _with_parents(path)]
    whole = next((item.structure for item in rows if item.reason is None), None)
    if whole == RECORDED:
        return None, (
            "it is of no known form: its steps are recorded when it is first called, and run without the Python between them",
        )
    if whole is not None:
        return whole, ()
    below = [item for item in plan.items if item.structure in LAYERS and item.name.startswith(f"{path}.")]
    return None, tuple(dict.fromkeys(item.reason for item in (*rows, *below) if item.reason is not None))


def _with_parents(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]


def _linears(module: nn.Module) -> int:
    """Modules with a matrix, whatever their class: GPT-2 has one of its own."""
    weights = (getattr(child, "weight", None) for child in module.modules())
    return sum(isinstance(weight, nn.Parameter) and weight.dim() == 2 for weight in weights)
