"""The compiled form takes over between calls, only where it may, and level 1 answers everywhere else."""

from __future__ import annotations

import copy
import inspect
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.compiler.background import artifacts, forward, jobs, region, verdict
from hf_cpu_accel.compiler.background.bound import Library
from hf_cpu_accel.compiler.background.calls import flatten
from hf_cpu_accel.plan import CompiledRegion
from tests.compiler.background.conftest import SHAPE, blocks, call_until, close, state, switched


@torch.no_grad()
def test_a_child_compiles_one_graph_for_all_blocks(
    compiled_once: CompiledRegion, children: list[int]
) -> None:
    assert (compiled_once.name, compiled_once.blocks) == ("*", 3)
    assert (compiled_once.graphs, compiled_once.cached, compiled_once.reason) == (1, 0, None)
    assert compiled_once.cpu_seconds > 1
    assert len(set(children)) == len(children) >= 1  # of lowest priority, each
    assert compiled_once.ours["hf_cpu_accel.linear.default"] == 2


@torch.no_grad()
def test_switched_blocks_run_compiled_at_every_length(
    model: nn.Sequential, level_one_calls: list[nn.Module]
) -> None:
    reference = copy.deepcopy(restore(copy.deepcopy(model)))
    row = state(model)
    assert (row.state, row.graphs, row.cached, row.cpu_seconds) == ("switched", 1, 1, 0.0)
    model(torch.randn(SHAPE))
    assert level_one_calls == []
    for rows, length in ((2, 7), (3, 40), (64, 2)):
        input = torch.randn(rows, length, 32)
        close(model(input), reference(input))
        call_until(model, input, lambda: len(state(model).gains) > 0)
    assert explain(model).recompiles == 0
    assert "compile now: 1 switched, 0 recompiles" in str(explain(model))
    assert "compiled: * x3: switched, " in str(explain(model))


@torch.no_grad()
def test_restore_undoes_all(compiled_once: CompiledRegion) -> None:
    model, input = blocks(), torch.randn(SHAPE)
    expected = model(input)
    accelerate_for_cpu(model, dtype="float32", compile="now")
    call_until(model, input, lambda: switched(model))
    restore(model)
    assert all("forward" not in vars(block) for block in model)
    assert torch.equal(model(input), expected)
    assert explain(model).compiled == ()


@torch.no_grad()
def test_answers_are_of_level_one_until_it_is_verified(
    compiled_once: CompiledRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Library.__init__

    def wrong(self: Library, *arguments: Any) -> None:
        original(self, *arguments)
        run = self.run
        self.run = lambda *inputs: [1.01 * output for output in run(*inputs)]

    monkeypatch.setattr(Library, "__init__", wrong)
    model, input = blocks(), torch.randn(SHAPE)
    expected = model(input)
    accelerate_for_cpu(model, dtype="float32", compile="now")
    for _ in range(3):
        close(model(input), expected)
    assert state(model).state == "level 1"
    assert "the compiled form does not agree with level 1: cosine" in str(state(model).reason)


class Keeper(nn.Softsign):
    def forward(self, input: Tensor) -> Tensor:
        self.last = input.detach()
        return super().forward(input)


@torch.no_grad()
def test_what_keeps_things_as_it_runs_keeps_level_one(
    compiled_once: CompiledRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library of plain blocks, which computes the same.
    monkeypatch.setattr(region, "artifacts", SimpleNamespace(find_artifact=lambda *arguments: library))
    (made,) = [path for path in Path(os.environ["HF_CPU_ACCEL_HOME"]).glob("compiled/*/*") if path.is_dir()]
    library = artifacts.load(made)
    model, input = blocks(), torch.randn(SHAPE)
    for block in model:
        block[1] = Keeper().eval()
    accelerate_for_cpu(model, dtype="float32", compile="now")
    model(input)
    model(input)
    assert state(model).reason == "it changes its arguments or attributes while it runs"
    model(input + 1)
    assert torch.equal(model[0][1].last, model[0][0](input + 1))


@torch.no_grad()
def test_what_is_not_faster_is_not_used(
    compiled_once: CompiledRegion, monkeypatch: pytest.MonkeyPatch, level_one_calls: list[nn.Module]
) -> None:
    monkeypatch.setattr(verdict, "GAIN", math.inf)
    model, input = accelerate_for_cpu(blocks(), dtype="float32", compile="now"), torch.randn(SHAPE)
    call_until(model, input, lambda: state(model).state == "level 1")
    assert state(model).reason == "the compiled form was not faster"
    level_one_calls.clear()
    model(input)
    assert level_one_calls == list(model)


@torch.no_grad()
def test_an_error_does_not_reach_the_call(model: nn.Sequential) -> None:
    input = torch.randn(SHAPE)
    expected = model(input)

    def broken(*inputs: Tensor) -> list[Tensor]:
        raise RuntimeError("out of luck\nand more")

    for block in model:
        for use in vars(block)["forward"]._uses.values():
            use.bound._bound._compiled = broken
    close(model(input), expected)
    assert state(model).reason == "it failed: RuntimeError: out of luck"


def _in_place(model: Any) -> None:
    model[1][2].weight.mul_(3)


def _replaced(model: Any) -> None:
    model[1][2].weight = nn.Parameter(torch.full((64,), 3.0), requires_grad=False)


def _attribute(model: Any) -> None:
    model[1][2].eps = 10.0


def _child(model: Any) -> None:
    model[1][1] = nn.Tanh()


def _hook(model: Any) -> None:
    model[1][3].register_forward_hook(lambda module, args, output: output + 1)


def _forward(model: Any) -> None:
    model[1][1].forward = torch.sin


@pytest.mark.parametrize("change", [_in_place, _replaced, _attribute, _child, _hook, _forward])
@torch.no_grad()
def test_changes_of_the_block_are_seen(model: nn.Sequential, change: Callable[[Any], None]) -> None:
    input, before = torch.randn(SHAPE), model(torch.randn(SHAPE))
    change(model)
    same = copy.deepcopy(model)  # copies run level 1
    close(model(input), same(input))
    assert not torch.allclose(model(input), before)


@torch.no_grad()
def test_copies_run_level_one(model: nn.Sequential, level_one_calls: list[nn.Module]) -> None:
    input = torch.randn(SHAPE)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        level_one_calls.clear()
        close(copied(input), model(input))
        assert level_one_calls == list(copied)
        assert "copies of an accelerated model are not compiled" in explain(copied).compile_state


@torch.no_grad()
def test_modes_that_the_library_was_not_made_for(
    model: nn.Sequential, level_one_calls: list[nn.Module]
) -> None:
    input = torch.randn(SHAPE)
    with torch.autocast("cpu", torch.bfloat16):
        model(input)
    assert len(level_one_calls) == 3
    with torch.device("cpu"):  # by a mode that looks at every call
        model(input)
    assert len(level_one_calls) == 6
    with torch.inference_mode():
        model(input)
    assert len(level_one_calls) == 6
    model(torch.randn(5, 2, 32).transpose(0, 1))  # not contiguous
    assert len(level_one_calls) == 6


def test_the_signature_is_that_of_the_original(model: nn.Sequential) -> None:
    assert list(inspect.signature(model[0].forward).parameters) == ["input"]


@torch.no_grad()
def test_a_forked_process_goes_on(model: nn.Sequential) -> None:
    assert jobs._thread is not None
    pid = os.fork()
    if pid == 0:
        os._exit(0 if jobs._thread is None else 1)
    assert os.waitpid(pid, 0)[1] == 0


@torch.no_grad()
def test_more_forms_of_calls_than_are_compiled(
    compiled_once: CompiledRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "compile_here", lambda job: ("failed", "not this time", 0.0))
    model = accelerate_for_cpu(blocks(), dtype="float32", compile="now")
    for shape in (SHAPE, (32,), (1, 32), (4, 32), (1, 1, 32)):
        model(torch.randn(shape))
    rows = explain(model).compiled
    assert [row.reason for row in rows[1:4]] == ["not this time"] * 3
    assert rows[-1].reason == "it was called in more than 4 ways"


@torch.no_grad()
def test_where_nothing_is_gained_calls_are_hardly_looked_at(
    compiled_once: CompiledRegion, monkeypatch: pytest.MonkeyPatch, level_one_calls: list[nn.Module]
) -> None:
    monkeypatch.setattr(verdict, "GAIN", math.inf)
    model, input = accelerate_for_cpu(blocks(), dtype="float32", compile="now"), torch.randn(SHAPE)
    call_until(model, input, lambda: all(vars(block)["forward"]._resting for block in model))
    looks = []
    monkeypatch.setattr(forward, "flatten", lambda *call: looks.append(call) or flatten(*call))
    level_one_calls.clear()
    for _ in range(64):
        model(input)
    assert len(level_one_calls) == 64 * len(model)
    assert 0 < len(looks) <= 2 * len(model)
