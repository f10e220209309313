"""What a call leaves behind in the attributes of modules, in lists and dictionaries, and in objects that keep a state."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from hf_cpu_accel.patching.plain_values import VALUES, is_same_value
from hf_cpu_accel.rewrite.core.first_call import LEFT

_STATELESS = (nn.Module, Tensor, ModuleType, *VALUES)
_DEEPEST = 4
# Attributes of recorded layers themselves, which other threads may call meanwhile.
OWN = frozenset(("_programs", "_left", "_changes", LEFT))
_MISSING = object()


class StateSnapshot:
    """What the modules of a shadow hold, to tell whether a call of it changed that, and to take it back.

    The attributes of shadows are their own, but lists, dictionaries and objects in them are those of the model.

    Args:
        modules: those that are not ours.
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
        """The name of an attribute that was changed, or in which something was; all is what it was again."""
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
