"""One model of equal blocks, compiled once for all tests of this folder by a real child process."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain
from hf_cpu_accel.compiler import report
from hf_cpu_accel.compiler.background import jobs, verdict
from hf_cpu_accel.compiler.background.forward import BlockForward
from hf_cpu_accel.plan import CompiledRegion
from tests.children import LAST_RESORT, cpu_seconds

SHAPE = (2, 5, 32)


def blocks(count: int = 3) -> nn.Sequential:
    """Blocks that no rule fuses whole; of classes that a child process can import."""

    def block() -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(32, 64), nn.Softsign(), nn.LayerNorm(64), nn.Linear(64, 32), nn.Tanhshrink()
        )

    return nn.Sequential(*(block() for _ in range(count))).eval()


def state(model: nn.Module) -> CompiledRegion:
    """Of the one region, called in one form."""
    (row,) = explain(model).compiled
    return row


@torch.no_grad()
def call_until(model: nn.Module, input: Tensor, done: Callable[[], bool], seconds: float = 120) -> int:
    """How many calls it took.

    Args:
        seconds: of CPU time that this process and its children may take for it. The clock is looked at against a child that hangs.
    """
    used, start, calls = cpu_seconds() + seconds, time.monotonic(), 0
    while not done():
        assert cpu_seconds() < used, str(explain(model))
        assert time.monotonic() < start + LAST_RESORT, str(explain(model))
        model(input)
        calls += 1
        time.sleep(0.02)
    return calls


def switched(model: nn.Module) -> bool:
    """Whether every block runs its compiled form."""
    forwards = [vars(block)["forward"] for block in model]
    return state(model).state == "switched" and all(
        use.verified for f in forwards for use in f._uses.values()
    )


@pytest.fixture(scope="session", autouse=True)
def children() -> Iterator[list[int]]:
    """The ids of those that were given the lowest priority, in order. They keep the one they have, since beside a busy machine one
    of lowest priority does not come to an end; `test_priority.py` has what was left out."""
    with pytest.MonkeyPatch.context() as patch:
        given: list[int] = []
        patch.setattr(jobs, "_yield_to_us", given.append)
        yield given


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _own_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(home))
    monkeypatch.setattr(verdict, "GAIN", 0.0)  # whatever is faster on the machine of the test
    report.say.cache_clear()


@pytest.fixture(scope="session")
def compiled_once(home: Path) -> CompiledRegion:
    """What `explain` said after the first compilation; its artifact is in `home` from then on."""
    torch.set_num_threads(1)  # as in the tests: the count is part of what is compiled
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_CPU_ACCEL_HOME", str(home))
        patch.setattr(verdict, "GAIN", 0.0)
        model = accelerate_for_cpu(blocks(), dtype="float32", compile="background")
        call_until(model, torch.randn(2, 5, 32), lambda: switched(model))
        return state(model)


@pytest.fixture
def model(compiled_once: CompiledRegion) -> nn.Sequential:
    """Accelerated and switched, from the artifact on disk."""
    model = accelerate_for_cpu(blocks(), dtype="float32", compile="now")
    call_until(model, torch.randn(2, 5, 32), lambda: switched(model))
    return model


@pytest.fixture
def level_one_calls(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The blocks that ran level 1, in order."""
    calls: list[nn.Module] = []
    original = BlockForward.level_one

    def noted(self: BlockForward, *arguments: object) -> object:
        calls.append(self.block)
        return original(self, *arguments)

    monkeypatch.setattr(BlockForward, "level_one", noted)
    return calls


def artifact(home: Path) -> Path:
    (made,) = [path for path in home.glob("compiled/*/*") if path.is_dir()]
    return made


@pytest.fixture
def copied(compiled_once: CompiledRegion, home: Path, tmp_path: Path) -> Path:
    """The artifact, in another folder."""
    return Path(shutil.copytree(artifact(home), tmp_path / "artifacts" / "copied"))


def close(output: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)
