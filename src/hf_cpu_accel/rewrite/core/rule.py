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
        module, path: the module and its path.
        data: the result of `match` that `apply` needs.
    """

    module: nn.Module
    path: str
    data: Any


@dataclass(frozen=True)
class Outcome:
    """The result of applying a rule.

    Attributes:
        items: one row of the plan per module considered.
        handled: the modules that no other rule gets.
    """

    items: tuple[PlanItem, ...]
    handled: tuple[nn.Module, ...]


class Rule(Protocol):
    """One kind of rewrite.

    `match` changes nothing. `apply` builds the replacement and compares it with the original if `config.verify` is set. It
    replaces the original through `context.journal`, which can undo that. If the two differ, the original stays and the items
    give the reason.
    """

    name: str

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None: ...

    def apply(self, match: Match, context: Context) -> Outcome: ...


def apply_rule(rule: Rule, match: Match, context: Context) -> Outcome:
    """Run `rule.apply`. With packed weights from a file that this rule did not write, it does nothing."""
    around = context.rule
    set_rule(rule.name, context)
    try:
        return rule.apply(match, context)
    except NotPacked:
        return Outcome((), ())
    finally:
        set_rule(around, context)


def set_rule(name: str, context: Context) -> None:
    """Make `name` the current rule."""
    context.rule = name
    saved = source()
    if saved is not None:
        saved.rule = name
