"""How pytest-xdist shares the tests out: each file to one process, and the files of a group to one.

By name, not by xdist's own `xdist_group`: since pytest 9.2 that has no effect (xdist 3.8 writes groups into ids, which are computed
now), and tests were dealt out one by one, so that each process made every fixture of a module.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling

# Files and folders whose tests share what takes long to make: hosts that are imported once to be forked from, compiled code.
GROUPS = {
    "programs": (
        *("acceptance/test_docs.py", "acceptance/test_examples.py", "acceptance/test_memory.py"),
        *("benchmarks/test_generation.py", "benchmarks/test_harness.py", "benchmarks/test_peers.py"),
        *("compiler/test_caches.py", "frontends/test_loading_memory.py"),
        *("frontends/packed/test_packed_memory.py", "frontends/packed/test_packed_refusals.py"),
        *("ops/test_fuzz.py", "ops/test_tiers.py", "ops/test_tiles.py"),
        "rewrite/tensor_parallel",
    ),
    "compiling": ("compiler", "hosts/test_pyg_compile.py"),
}


def group_of(nodeid: str) -> str:
    """The group of a test, or its file."""
    path = PurePosixPath(nodeid.partition("::")[0])
    parts = path.relative_to("tests") if path.is_relative_to("tests") else path
    names = {str(parts), *map(str, parts.parents)}
    return next((group for group, members in GROUPS.items() if names.intersection(members)), str(path))


class Groups(LoadScopeScheduling):
    """Groups are what it deals out, as they come: the long ones are not at the end."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
