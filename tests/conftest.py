"""Shared fixtures: seeds, and thread counts that are put back."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

# Read as torch is loaded, in all processes that tests start, too. Threads of OpenMP that wait in a loop take the core of that
# which they wait for, beside another process of tests: on two cores most of the time went into that.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# A compiler that builds torch's headers knows the instructions that this CPU has. Inductor would try each set of them, ten seconds
# in each folder that it compiles into.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# The C++ that Inductor writes around kernels runs once per call, and optimizing it takes longer than compiling all else. Kernels
# are optimized as always.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
# The hosts read this when they are imported, once for all programs of a process of tests (tests/programs.py): a folder of its own,
# which the fixture `hub` fills, whichever test comes first.
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hf_home_")
# Dynamo looks for garbage after each graph.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

import pytest
import torch
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from hf_cpu_accel.frontends import import_hook

atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
# What is imported stays: looking for garbage among the millions of objects of torch, transformers and diffusers took a third of the
# time that collecting the tests takes. See `pytest_collection_finish`.
gc.disable()

# The same examples in every run: a check that fails on one machine can be repeated on another. Hypothesis mixes constants of the
# local modules that happen to be loaded into what it draws: the order of the tests, or a new file, would change the examples.
providers._get_local_constants = lambda: providers.Constants()
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


# One thread, unless a test sets more: in the small ops of tiny models, beside another process of tests, they only wait.
torch.set_num_threads(1)
# No test depends on what is fastest on the machine it runs on; those of the choice itself set it up with numbers of their own.
os.environ.setdefault("HF_CPU_ACCEL_PROVIDERS", "own")
# An error of our own fails the test; without it, it would read as a layer that is not recognized.
os.environ.setdefault("HF_CPU_ACCEL_STRICT", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """With `--dist loadscope`, files go to the processes as `tests/groups.py` has them."""
    from tests.groups import Groups

    return Groups(config, log) if config.getvalue("dist") == "loadscope" else None


def pytest_collection_finish() -> None:
    """From here on there is garbage. Who looks for it leaves out what has been imported; who looks for referrers does not."""
    gc.freeze()
    gc.set_threshold(100_000)  # from 700: compiling and accelerating make objects by the million
    gc.enable()
    get_referrers = gc.get_referrers

    def referrers(*objects: object) -> list[object]:
        gc.unfreeze()
        found = get_referrers(*objects)
        gc.freeze()
        return found

    gc.get_referrers = referrers
    # For its log alone Dynamo measures the guards of each graph, after it has emptied the caches of the processor: 25 ms.
    guards = sys.modules.get("torch._dynamo.guards")
    if guards is not None:
        vars(guards)["profile_guard_manager"] = lambda *_: 0.0


@pytest.fixture(autouse=True)
def _keyword_of_loaders() -> Iterator[None]:
    """A test that takes the patches of host libraries back, and leaves it at that, fails itself, and not those behind it."""
    yield
    assert import_hook.installed(), (
        "the test uninstalled hf_cpu_accel's patches and did not install them again"
    )


@pytest.fixture(autouse=True)
def _seed_and_threads() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> int:
    """A thread count, set for the test."""
    torch.set_num_threads(request.param)
    return request.param


@pytest.fixture
def plant(tmp_path: Path) -> Callable[[Mapping[str, str]], Path]:
    """A fake machine: the `/proc` and `/sys` files that matter to a test. Write `{path below the root: text}` and give the root."""

    def write(files: Mapping[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return tmp_path

    return write
