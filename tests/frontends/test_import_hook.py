"""The import hook on throw-away modules: patched once after import, put back exactly, and no trace left."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
import types

import pytest

from hf_cpu_accel.frontends import import_hook

MODULE = "hook_host_sample"
SOURCE = "import time\ntime.sleep({delay})\ndef greet():\n    return 'plain'\n"


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Writes the sample module; the suite's own installation steps aside for the time of the test."""
    was_installed = import_hook.installed()
    import_hook.uninstall()
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(delay: float = 0.0, source: str = SOURCE) -> None:
        (tmp_path / f"{MODULE}.py").write_text(source.format(delay=delay))
        importlib.invalidate_caches()

    write()
    yield write
    import_hook.uninstall()
    sys.modules.pop(MODULE, None)
    if was_installed:
        import_hook.install()


def patch_greet(module, journal):
    original = module.greet
    journal.replace(module, "greet", lambda: "patched " + original())


def finders():
    return [f for f in sys.meta_path if type(f).__module__ == import_hook.__name__]


def test_patches_a_module_imported_later(host):
    import_hook.install({MODULE: patch_greet})
    assert MODULE not in sys.modules
    module = importlib.import_module(MODULE)
    assert module.greet() == "patched plain"


def test_patches_a_module_imported_before(host):
    module = importlib.import_module(MODULE)
    import_hook.install({MODULE: patch_greet})
    assert module.greet() == "patched plain"


@pytest.mark.parametrize("imported_first", [True, False])
def test_uninstall_puts_the_original_object_back(host, imported_first):
    seen = []

    def patch(module, journal):
        seen.append(module.greet)
        patch_greet(module, journal)

    if imported_first:
        importlib.import_module(MODULE)
    import_hook.install({MODULE: patch})
    module = importlib.import_module(MODULE)
    import_hook.uninstall()
    assert module.greet is seen[0]
    assert finders() == []
    assert not import_hook.installed()


def test_install_and_uninstall_twice_are_no_ops(host):
    import_hook.install({MODULE: patch_greet})
    import_hook.install({MODULE: patch_greet})
    assert len(finders()) == 1
    assert importlib.import_module(MODULE).greet() == "patched plain"
    import_hook.uninstall()
    import_hook.uninstall()
    assert importlib.import_module(MODULE).greet() == "plain"


def test_can_be_installed_again(host):
    module = importlib.import_module(MODULE)
    for _ in range(2):
        import_hook.install({MODULE: patch_greet})
        assert module.greet() == "patched plain"
        import_hook.uninstall()
        assert module.greet() == "plain"


def test_a_reloaded_module_is_patched_again_and_only_once(host):
    import_hook.install({MODULE: patch_greet})
    module = importlib.reload(importlib.import_module(MODULE))
    assert module.greet() == "patched plain"
    import_hook.uninstall()
    assert module.greet() == "plain"


def test_module_keeps_its_own_loader_and_source(host):
    import_hook.install({MODULE: patch_greet})
    module = importlib.import_module(MODULE)
    assert isinstance(module.__spec__.loader, importlib.machinery.SourceFileLoader)
    assert module.__loader__ is module.__spec__.loader
    assert "def greet" in inspect.getsource(module)


def test_a_patch_that_does_not_fit_warns_and_the_import_goes_on(host):
    def patch(module, journal):
        journal.replace(module, "no_such_function", None)

    import_hook.install({MODULE: patch})
    with pytest.warns(RuntimeWarning, match=rf"{MODULE}.*no_such_function.*accelerate_for_cpu"):
        module = importlib.import_module(MODULE)
    assert module.greet() == "plain"


def test_a_module_that_fails_to_import_raises_its_own_error(host):
    host(source="raise OSError('the module itself')\n")
    import_hook.install({MODULE: patch_greet})
    with pytest.raises(OSError, match="the module itself"):
        importlib.import_module(MODULE)


def test_foreign_wrapper_on_top_of_ours_survives_uninstall(host):
    module = importlib.import_module(MODULE)
    import_hook.install({MODULE: patch_greet})
    ours = module.greet
    foreign = lambda: "foreign " + ours()  # noqa: E731
    module.greet = foreign
    import_hook.uninstall()
    assert module.greet is foreign


@pytest.mark.parametrize("cached", ["before", "after"])
def test_lazy_packages_that_cache_the_object_follow(host, cached):
    module = importlib.import_module(MODULE)
    original = module.greet
    # Not in sys.modules, as after transformers' second execution of its __init__.
    package = types.ModuleType("hook_host_package")

    def patch(module, journal):
        wrapper = lambda: "patched"  # noqa: E731
        journal.replace(module, "greet", wrapper)
        journal.replace_cached("hook_host_package", "greet", original, wrapper)

    if cached == "before":
        package.greet = original
    import_hook.install({MODULE: patch})
    if cached == "after":
        package.greet = module.greet
    assert package.greet() == "patched"
    import_hook.uninstall()
    assert package.greet is original


def test_other_hooks_that_search_through_us_do_not_recurse(host):
    class Other:
        def __init__(self):
            self.busy = False

        def find_spec(self, name, path=None, target=None):
            if name != MODULE or self.busy:
                return None
            self.busy = True
            try:
                return importlib.util.find_spec(name)
            finally:
                self.busy = False

    other = Other()
    import_hook.install({MODULE: patch_greet})
    sys.meta_path.insert(0, other)
    try:
        assert importlib.import_module(MODULE).greet() == "patched plain"
    finally:
        sys.meta_path.remove(other)


def test_install_waits_for_an_import_that_another_thread_is_in(host):
    host(delay=0.3)
    importing = threading.Thread(target=importlib.import_module, args=(MODULE,))
    importing.start()
    while MODULE not in sys.modules:
        pass
    import_hook.install({MODULE: patch_greet})
    importing.join()
    assert sys.modules[MODULE].greet() == "patched plain"


def test_many_threads_patch_once(host):
    host(delay=0.05)
    calls = []

    def patch(module, journal):
        calls.append(module)
        patch_greet(module, journal)

    import_hook.install({MODULE: patch})
    threads = [threading.Thread(target=importlib.import_module, args=(MODULE,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert sys.modules[MODULE].greet() == "patched plain"
