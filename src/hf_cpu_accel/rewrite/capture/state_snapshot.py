"""Detect changes that a call leaves in the attributes of modules, in lists and dictionaries, and in stateful objects."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from hf_cpu_accel.guard.plain_values import VALUES, is_same_value
from hf_cpu_accel.rewrite.core.first_call import LEFT

_STATELESS = (nn.Module, Tensor, ModuleType, *VALUES)
_DEEPEST = 4
# Attributes of recorded layers themselves, which other threads may call meanwhile.
OWN = frozenset(("_programs", "_left", "_changes", LEFT))
_MISSING = object()


class StateSnapshot:
    """A snapshot of the attributes of a shadow's modules, to detect changes of a call and to undo them.

    Shadows have their own attributes, but lists, dictionaries and objects in them belong to the model.

    Args:
        modules: those that are not of this package.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._seen: set[int] = set()
        self._contents: list[
            tuple[str, Any, dict[Any, Any]]
        ] = []  # (name of an attribute, container in it, content)
        for module in modules:
            self._contents.append(("", vars(module), dict(vars(module))))
            for name, value in vars(module).items():
                if name not in OWN:
                    self._note(name, value, _DEEPEST)

    def restore(self) -> str | None:
        """Restore all contents, and return the name of an attribute that had changed, or None."""
        changed = None
        for name, container, content in self._contents:
            differing = [key for key in _differing(_content(container), content) if key not in OWN]
            if differing:
                changed = changed or name or str(differing[0])
                _fill(container, content)
        return changed

    def _note(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, _STATELESS) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        container = (
            value if isinstance(value, list | dict | set | deque) else getattr(value, "__dict__", None)
        )
        parts: Any = value if type(value) is tuple else ()
        if isinstance(container, list | dict | set | deque):
            content = _content(container)
            self._contents.append((name, container, content))
            parts = content.values()
        for part in parts if depth else ():
            self._note(name, part, depth - 1)


def _content(container: Any) -> dict[Any, Any]:
    if isinstance(container, dict):
        return dict(container)
    return {part: part for part in container} if isinstance(container, set) else dict(enumerate(container))


def _differing(one: dict[Any, Any], other: dict[Any, Any]) -> Iterator[Any]:
    for key in {**one, **other}:
        if not is_same_value(one.get(key, _MISSING), other.get(key, _MISSING)):
            yield key


def _fill(container: Any, content: dict[Any, Any]) -> None:
    container.clear()
    if isinstance(container, dict | set):
        container.update(content)
    else:
        container.extend(content.values())
