"""Replace attributes of host libraries, and put the originals back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import ModuleType
from typing import Any


class HostPatches:
    """The replacements of one installation, in order, so that `undo` can put the originals back.

    `undo` sets `active` to False. A wrapper that another library has wrapped or copied cannot be removed there. It reads this
    flag, and then only passes calls on.
    """

    def __init__(self) -> None:
        self.active = True
        self._entries: list[tuple[Any, str, Any, Any]] = []
        self._cached: list[tuple[str, str, Any, Any]] = []
        self._registered: list[tuple[dict[str, Any], str]] = []

    def replace(self, owner: Any, name: str, replacement: Any) -> None:
        """Replace the attribute `name` that `owner`, a class or module, defines itself."""
        original = vars(owner)[name]
        self._entries.append((owner, name, original, replacement))
        setattr(owner, name, replacement)

    def register(self, table: dict[str, Any], name: str, value: Any) -> None:
        """Add an entry to a table of the host."""
        table[name] = value
        self._registered.append((table, name))

    def replace_cached(self, package: str, name: str, original: Any, replacement: Any) -> None:
        """Replace the copies of `original` in lazy package objects, now and at `undo`.

        A lazy package stores attributes that were looked up. transformers executes its `__init__` a second time while its modules
        load, so the package object of the user may not be the one in `sys.modules`. So the namespaces are found from the object
        that they refer to.
        """
        self._cached.append((package, name, original, replacement))
        _swap_cached(package, name, original, replacement)

    def undo(self) -> None:
        """Put the original objects back wherever the replacement is still in place."""
        self.active = False
        for owner, name, original, replacement in reversed(self._entries):
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original)
        for package, name, original, replacement in self._cached:
            _swap_cached(package, name, replacement, original)
        for table, name in self._registered:
            table.pop(name, None)
        self._registered.clear()
        self._entries.clear()
        self._cached.clear()


def _swap_cached(package: str, name: str, old: Any, new: Any) -> None:
    for namespace in gc.get_referrers(old):
        if isinstance(namespace, dict) and (namespace.get("__name__"), namespace.get(name)) == (package, old):
            namespace[name] = new


Patch = Callable[[ModuleType, HostPatches], None]
