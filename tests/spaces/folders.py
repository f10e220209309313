"""The folders in integrations/spaces, and the modules in them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
FOLDERS = ROOT / "integrations" / "spaces"
SPACES = sorted(path.name for path in FOLDERS.iterdir() if (path / "app.py").exists())


def module_of(folder: str, name: str) -> ModuleType:
    """`name`.py of a Space, under a name of its own: folders may have modules of the same name."""
    spec = importlib.util.spec_from_file_location(f"{folder}.{name}", FOLDERS / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module
