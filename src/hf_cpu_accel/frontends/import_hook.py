"""Patch host libraries right after they are imported, and remove all patches.

`import hf_cpu_accel` does not import transformers, but transformers must support the keyword `cpu_optimize=` afterwards. So
`install()` patches the host modules that are already loaded, and adds a finder to `sys.meta_path` that patches the others when
they are imported. The patches are a table, {module name: function}. The default tables are `PATCHES` of `frontends.keyword` and
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
    """Run a module with its original loader, then apply the patch. The module only sees the original loader."""

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
        # A module may replace itself in sys.modules, as the lazy modules of transformers do.
        self._hook.patch(module.__name__, sys.modules.get(module.__name__, module), fresh=True)

    def __getattr__(self, name: str) -> Any:
        # get_source, is_package, ...: those of the original loader.
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class _ImportHook(MetaPathFinder):
    """One installation: the table of patches, the patches that were applied, and their replacements."""

    def __init__(self, patches: Mapping[str, Patch]) -> None:
        self.patches = dict(patches)
        self.replaced = HostPatches()
        self._patched: set[str] = set()
        self._lock = threading.Lock()
        self._searching = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Other import hooks search sys.meta_path too; the guard prevents a mutual recursion.
        if fullname not in self.patches or getattr(self._searching, "name", None) == fullname:
            return None
        self._searching.name = fullname
        try:
            specs = (self._find(finder, fullname, path, target) for finder in list(sys.meta_path))
            spec = next(filter(None, specs), None)
        finally:
            self._searching.name = None
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _PatchingLoader(spec.loader, self)  # type: ignore[arg-type]
        return spec

    def _find(
        self, finder: Any, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        find_spec = None if finder is self else getattr(finder, "find_spec", None)
        return None if find_spec is None else find_spec(fullname, path, target)

    def patch(self, name: str, module: ModuleType, fresh: bool = False) -> None:
        """Apply the patch of a module, once per execution of the module.

        A patch that fails only warns, so that the import of the host succeeds.

        Args:
            name: name of the module.
            module: the module.
            fresh: True if the module was executed just now.
        """
        with self._lock:
            if not self.replaced.active or (name in self._patched and not fresh):
                return
            self._patched.add(name)
            try:
                self.patches[name](module, self.replaced)
            except Exception as error:  # a future version of the host may differ
                warnings.warn(
                    f"hf_cpu_accel could not add the keyword cpu_optimize= to {name} "
                    f"({type(error).__name__}: {error}); call hf_cpu_accel.accelerate_for_cpu(model) instead",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def start(self) -> None:
        """Add the finder, and patch the modules that are already loaded."""
        sys.meta_path.insert(0, self)
        for name in self.patches:
            if name in sys.modules:
                # import_module waits for another thread that is executing the module.
                self.patch(name, importlib.import_module(name))

    def stop(self) -> None:
        """Remove the finder and all patches."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        with self._lock:
            self.replaced.undo()


_install_lock = threading.Lock()
_installed: _ImportHook | None = None


def install(patches: Mapping[str, Patch] | None = None) -> None:
    """Add the keyword `cpu_optimize=` to transformers, diffusers and sentence-transformers.

    Loaded modules are patched now, others when they are imported. `import hf_cpu_accel` calls this; a second call does nothing.

    Args:
        patches: {module name: function(module, patches)}; each function makes its replacements with the `HostPatches`. None for the
            patches that add the keyword.
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
    hook.start()  # outside the lock, because it may wait for an import in another thread


def uninstall() -> None:
    """Undo `install`: remove the finder, and put the original objects back in all patched attributes.

    Accelerated models stay accelerated; use `restore` for them. Without `install` before, this does nothing.
    """
    global _installed
    with _install_lock:
        hook, _installed = _installed, None
    if hook is not None:
        hook.stop()


def installed() -> bool:
    """Return whether the patches are active."""
    return _installed is not None
