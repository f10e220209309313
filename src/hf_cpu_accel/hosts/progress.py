"""Whether the host libraries show progress bars: their switches are ours, too."""

from __future__ import annotations

import sys

# A library that was not imported has nothing to say. That of diffusers has no public name for what its switch says.
_SWITCHES = ("transformers.utils.logging", "diffusers.utils.logging")


def shows_progress() -> bool | None:
    """What `disable_progress_bar()` of the hosts was told; None where none is there to ask, and terminals get a bar."""
    hosts = [module for name in _SWITCHES if (module := sys.modules.get(name)) is not None]
    return all(getattr(module, "_tqdm_active", True) for module in hosts) if hosts else None
