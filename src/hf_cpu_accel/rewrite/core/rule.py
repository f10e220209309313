"""The interface of a rewrite rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.packed_source import NotPacked, source


@dataclass(frozen=True)
class Match:
    """A structure that a rule recognized.

    Attributes:
        module, path: where.
        data: what `match` found, for `apply`.
    """

    module: nn.Module
    path: str
    data: Any


@dataclass(frozen=True)
class Outcome:
    """What came of a match.

    Attributes:
        items: one per module considered, for the plan.
        handled: the modules that no other rule must look at.
    """

    items: tuple[PlanItem, ...]
    handled: tuple[nn.Module, ...]


class Rule(Protocol):
    """One kind of rewrite.

    `match` only looks. `apply` builds the replacement, compares it with the original if `config.verify`, and puts it in
    place through `context.journal`, which is how it is undone; if it does not agree, the original stays and the items
    say so.
    """

    name: str

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None: ...

    def apply(self, match: Match, context: Context) -> Outcome: ...


def apply_rule(rule: Rule, match: Match, context: Context) -> Outcome:
    """`rule.apply`; where packed weights are taken from a file, and this rule had no part in them, nothing is done."""
    around = context.rule
    set_rule(rule.name, context)
    try:
        return rule.apply(match, context)
    except NotPacked:
        return Outcome((), ())
    finally:
        set_rule(around, context)


def set_rule(name: str, context: Context) -> None:
    """Have `name` be the rule at work."""
    context.rule = name
    saved = source()
    if saved is not None:
        saved.rule = name
