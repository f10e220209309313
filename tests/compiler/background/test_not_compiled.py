"""Blocks that cannot be compiled, and callers that see level 1: each says so, and answers stay right."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_cpu_accel import accelerate_for_cpu, explain
from hf_cpu_accel.compiler.torch_private import versions
from tests.compiler.background.conftest import SHAPE, blocks, call_until, close, state


@torch.no_grad()
def test_without_a_compiler_level_one_serves_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            model, input = blocks(), torch.randn(SHAPE)
            expected = model(input)
            accelerate_for_cpu(model, dtype="float32", compile="background")
            call_until(model, input, lambda model=model: state(model).state == "level 1", seconds=10)
            close(model(input), expected)
            assert state(model).reason == "no C++ compiler found (install g++ or set CXX)"
            assert explain(model).compile_state == f"background: off, {state(model).reason}; level 1 runs"
    (record,) = [record for record in caplog.records if record.name.startswith("hf_cpu_accel")]
    assert record.getMessage().startswith("hf_cpu_accel: no C++ compiler found (install g++ or set CXX)")


@torch.no_grad()
def test_on_an_unknown_torch_nothing_stands_before_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "VERSIONS", {"2.1": versions.Names()})
    model, input = blocks(), torch.randn(SHAPE)
    expected = model(input)
    accelerate_for_cpu(model, dtype="float32", compile="background")
    close(model(input), expected)
    told = explain(model).compile_state
    assert told.startswith(f"background: off, torch {torch.__version__} is not among the versions")
    assert told.endswith("level 1 runs")
    assert not any("forward" in vars(module) for module in model)


@torch.no_grad()
def test_what_cannot_be_sent_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(tmp_path))

    class Mine(nn.Softsign):
        __module__ = "__main__"

    model, input = blocks(), torch.randn(SHAPE)
    for block in model:
        block[1] = Mine().eval()
    accelerate_for_cpu(model, dtype="float32", compile="background")
    call_until(model, input, lambda: state(model).state == "level 1", seconds=10)
    assert str(state(model).reason).startswith("Mine is defined in __main__")


@torch.no_grad()
def test_a_failed_child_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    model, input = accelerate_for_cpu(blocks(), dtype="float32", compile="background"), torch.randn(SHAPE)
    call_until(model, input, lambda: state(model).state == "level 1", seconds=10)
    assert state(model).reason == "the compiling process exited with code 1: no message"


@torch.no_grad()
def test_torch_compile_and_export_see_level_one(model: nn.Sequential) -> None:
    input = torch.randn(SHAPE)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    close(compiled(input), model(input))
    program = torch.export.export(model, (input,), strict=False)
    close(program.module()(input), model(input))
