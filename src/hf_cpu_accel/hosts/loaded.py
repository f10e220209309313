"""Classes of host libraries whose files have been imported.

An object of a class implies that the file which defines the class was imported, so nothing is ever imported to recognize one. An
import could fail: host libraries import their own optional packages, and a broken one of these must not stop a target that needs
none of them.
"""

from __future__ import annotations

import sys


def loaded(file: str, *names: str) -> tuple[type, ...]:
    """Return the classes called `names` that `file` defines, for `isinstance`; none where it was not imported, or lacks them.

    Args:
        file: the dotted name of a module. Of a package that loads lazily, name the file inside: its attributes import.
    """
    content = getattr(sys.modules.get(file), "__dict__", {})
    return tuple(content[name] for name in names if name in content)
