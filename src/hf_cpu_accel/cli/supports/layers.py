"""Find the layers of an accelerated model that run as one call, and the reasons of the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from hf_cpu_accel.plan import Plan
from hf_cpu_accel.rewrite.core.refusal import RECORDED

# Attention has this many; a member of a list with fewer is not a transformer layer.
_FEWEST_LINEARS = 4


@dataclass(frozen=True)
class Layers:
    """Equal layers of one list.

    Attributes:
        path: path of the list.
        kind: class name of the layers.
        count: number of these layers in the list.
        runs_as: structure that runs as one call; None if the modules of the layers run separately.
        reasons: why they run separately; empty otherwise.
    """

    path: str
    kind: str
    count: int
    runs_as: str | None
    reasons: tuple[str, ...]


def members(model: nn.Module) -> dict[str, str]:
    """Return {path: class name} of the transformer layers in lists of layers, also in lists inside of stages.

    Call it before the model is accelerated.
    """
    result: dict[str, str] = {}
    for path, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            for number, member in child.named_children():
                inner = {} if _are_parts(member) else members(member)
                if not inner and _linears(member) >= _FEWEST_LINEARS:
                    inner = {"": type(member).__name__}
                result |= {f"{path}.{number}.{name}".rstrip("."): kind for name, kind in inner.items()}
        else:
            result |= {f"{path}.{name}": kind for name, kind in members(child).items()}
    return result


def _are_parts(member: nn.Module) -> bool:
    """Return whether the lists of `member` contain several classes: then they are parts of a layer (as in T5), not layers."""
    lists = [child for child in member.children() if isinstance(child, nn.ModuleList)]
    return any(len({type(part) for part in parts}) > 1 for parts in lists)


def layers(kinds: Mapping[str, str], plan: Plan) -> list[Layers]:
    """Return the layers and how they run, in the order of the model.

    Args:
        kinds: the result of `members` for the original model.
        plan: `explain()` of the accelerated model.
    """
    counts: dict[tuple[str, str, str | None, tuple[str, ...]], int] = {}
    for path, kind in kinds.items():
        key = (path.rpartition(".")[0], kind, *_outcome(path, plan))
        counts[key] = counts.get(key, 0) + 1
    return [Layers(path, kind, count, *outcome) for (path, kind, *outcome), count in counts.items()]  # type: ignore[arg-type]


def _outcome(path: str, plan: Plan) -> tuple[str | None, tuple[str, ...]]:
    rows = [item for item in plan.items if item.scope is not None and item.name in _with_parents(path)]
    structure = next((item.structure for item in rows if item.reason is None), None)
    if structure == RECORDED:
        return None, (
            "its structure is not known: the first call captures its steps, and later calls replay them without Python",
        )
    if structure is not None:
        return structure, ()
    below = [item for item in plan.items if item.scope is not None and item.name.startswith(f"{path}.")]
    return None, tuple(dict.fromkeys(item.reason for item in (*rows, *below) if item.reason is not None))


def _with_parents(path: str) -> Iterator[str]:
    """Yield `path` and the paths of its parents."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _linears(module: nn.Module) -> int:
    """Return the number of modules with a matrix, of any class: the linears of GPT-2 are not nn.Linear."""
    weights = (getattr(child, "weight", None) for child in module.modules())
    return sum(isinstance(weight, nn.Parameter) and weight.dim() == 2 for weight in weights)
