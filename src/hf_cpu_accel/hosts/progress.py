"""The switches of host libraries for progress bars, which this package follows."""

from __future__ import annotations

import sys

# Libraries that are not imported are ignored. The switch of diffusers has no public getter.
_SWITCHES = ("transformers.utils.logging", "diffusers.utils.logging")


def shows_progress() -> bool | None:
    """Return whether the host libraries show progress bars; None if none is imported (then terminals get a bar)."""
    hosts = [module for name in _SWITCHES if (module := sys.modules.get(name)) is not None]
    return all(getattr(module, "_tqdm_active", True) for module in hosts) if hosts else None
