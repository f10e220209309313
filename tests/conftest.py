"""Shared fixtures: seeds, and thread counts that are put back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from hf_cpu_accel.frontends import import_hook

# The same examples in every run: a check that fails on one machine can be repeated on another. Hypothesis mixes constants of the
# local modules that happen to be loaded into what it draws: the order of the tests, or a new file, would change the examples.
providers._get_local_constants = lambda: providers.Constants()
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


# No test depends on what is fastest on the machine it runs on; those of the choice itself set it up with numbers of their own.
os.environ.setdefault("HF_CPU_ACCEL_PROVIDERS", "own")
# An error of our own fails the test; without it, it would read as a layer that is not recognised.
os.environ.setdefault("HF_CPU_ACCEL_STRICT", "1")


# Threads that wait for one another in the microsecond ops of tiny models cost more than they save, the more so on a busy machine.
ONE_THREAD = ("concurrency", "generate", "lazy", "patching", "providers", "rewrite")


@pytest.fixture(autouse=True)
def _keyword_of_loaders() -> Iterator[None]:
    """A test that takes the patches of host libraries back, and leaves it at that, fails itself, and not those behind it."""
    yield
    assert import_hook.installed(), (
        "the test uninstalled hf_cpu_accel's patches and did not install them again"
    )


@pytest.fixture(autouse=True)
def _seed_and_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    if request.path.relative_to(Path(__file__).parent).parts[0] in ONE_THREAD:
        torch.set_num_threads(1)
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
