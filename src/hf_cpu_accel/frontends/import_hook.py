"""Patch host libraries right after they are imported, and take every patch back.

`import hf_cpu_accel` must not import transformers, yet transformers has to know the keyword `cpu_optimize=`
afterwards. So `install()` patches the host modules that are loaded already, and leaves a finder on
`sys.meta_path` that patches the others when they are imported. What is patched is a table (module name ->
function); the default ones are `PATCHES` of `frontends.keyword` and
`frontends.sentence_encoders`.
"""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hf_cpu_accel.frontends.patches import HostPatches, Patch


class _PatchingLoader(Loader):
    """Runs a module with its own loader, then the patch. Steps aside first: the module never sees it."""

    def __init__(self, inner: Loader, hook: _ImportHook) -> None:
        self.inner = inner
        self._hook = hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = self.inner
        module.__loader__ = self.inner
        self.inner.exec_module(module)
        # A module may put another object in its place (transformers does, with its lazy modules).
        self._hook.patch(module.__name__, sys.modules.get(module.__name__, module), fresh=True)

    def __getattr__(self, name: str) -> Any:
        # get_source, is_package, ...: as the module's own loader has them.
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class _ImportHook(MetaPathFinder):
    """One installation: the table of patches, which of them ran, and what they replaced."""

    def __init__(self, patches: Mapping[str, Patch]) -> None:
        self.patches = dict(patches)
        self.replaced = HostPatches()
        self._patched: set[str] = set()
        self._lock = threading.Lock()
        self._searching = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Other import hooks search sys.meta_path too: the guard ends what would be a mutual recursion.
        if fullname not in self.patches or getattr(self._searching, "name", None) == fullname:
            return None
        self._searching.name = fullname
        try:
            found = (self._ask(finder, fullname, path, target) for finder in list(sys.meta_path))
            spec = next(filter(None, found), None)
        finally:
            self._searching.name = None
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _PatchingLoader(spec.loader, self)  # type: ignore[arg-type]
        return spec

    def _ask(
        self, finder: Any, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        find_spec = None if finder is self else getattr(finder, "find_spec", None)
        return None if find_spec is None else find_spec(fullname, path, target)

    def patch(self, name: str, module: ModuleType, fresh: bool = False) -> None:
        """Apply the patch for `name`, once per execution of the module (`fresh`: it has just been executed).

        A patch that does not fit only warns: the host's import must go on.
        """
        with self._lock:
            if not self.replaced.active or (name in self._patched and not fresh):
                return
            self._patched.add(name)
            try:
                self.patches[name](module, self.replaced)
            except Exception as error:  # a future release of the host may differ in any way
                warnings.warn(
                    f"hf_cpu_accel could not add the keyword cpu_optimize= to {name} "
                    f"({type(error).__name__}: {error}); call hf_cpu_accel.accelerate_for_cpu(model) instead",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def start(self) -> None:
        sys.meta_path.insert(0, self)
        for name in self.patches:
            if name in sys.modules:
                # import_module waits until another thread that is just running the module has finished it.
                self.patch(name, importlib.import_module(name))

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        with self._lock:
            self.replaced.undo()


_install_lock = threading.Lock()
_installed: _ImportHook | None = None


def install(patches: Mapping[str, Patch] | None = None) -> None:
    """Patch the modules of `patches` now (if loaded) or as soon as they are imported. Again: nothing happens.

    Args:
        patches: module name -> function(module, patches) that makes its replacements through the `HostPatches`; by
            default those that add the keyword `cpu_optimize=`.
    """
    global _installed
    with _install_lock:
        if _installed is not None:
            return
        if patches is None:
            from hf_cpu_accel.frontends import keyword, sentence_encoders

            patches = {**keyword.PATCHES, **sentence_encoders.PATCHES}
        _installed = _ImportHook(patches)
        hook = _installed
    hook.start()  # outside the lock: it may wait for an import that another thread is in the middle of


def uninstall() -> None:
    """Take back what `install` did: the finder goes, every patched attribute is its original object again.

    Models that were accelerated in between stay accelerated (`restore` is for them). Without `install`
    before: nothing.
    """
    global _installed
    with _install_lock:
        hook, _installed = _installed, None
    if hook is not None:
        hook.stop()


def installed() -> bool:
    """Whether the patches are in force."""
    return _installed is not None
