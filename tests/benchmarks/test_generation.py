"""The harness of text generation: real worker processes on a tiny checkpoint, and how its numbers are made."""

import json
import stat
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from benchmarks.driver import WorkerError
from benchmarks.generation import __main__ as generation
from benchmarks.generation import cases, report, systems
from benchmarks.generation.harness import Record, Run, run
from benchmarks.peers import build_llamacpp, llamacpp
from hf_cpu_accel.config import DTYPES
from hf_cpu_accel.measure.generation import Generated
from hf_cpu_accel.runtime import hardware
from tests.benchmarks.conftest import PROBE


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    folder = tmp_path / "tiny-llama"
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def text(first: float, step: float, bandwidth: float | None = 40e9) -> Run:
    return Run(Generated(first, (step, step)), bandwidth)


def record(system: str, *runs: Run, **facts: object) -> Record:
    base = (text(0.2, 0.1), text(0.4, 0.2))
    return Record(
        "m:8+3",
        system,
        8,
        None,
        runs,
        base,
        {"dtype": "int8", "step_bytes": 10**9, **facts},
        {"first_flops": 4 * 10**9},
        (PROBE, {**PROBE, "int8": 400.0}),
    )


@pytest.mark.usefixtures("forked_workers", "no_probes")
def test_systems_write_side_by_side_and_broken_ones_are_rows(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "measure_read_bandwidth", lambda threads: 40.0)
    said: list[str] = []
    records = run(
        str(checkpoint),
        ["ours-int8", "no-such-system", "llamacpp-q8_0"],
        prompt=6,
        new=4,
        rounds=2,
        threads=1,
        priority=False,
        say=said.append,
    )
    base, ours, unknown, rival = records
    assert base.system == "eager-bf16"
    assert base.step_speedup.value == 1.0
    weights = 64 * (64 + 64) + 64 * 64 + 3 * 64 * 96 + 96 * 64
    assert base.ready["step_bytes"] == 2 * weights
    assert weights < ours.ready["step_bytes"] < 1.3 * weights
    assert [len(one.text.steps) for one in ours.runs] == [3, 3]
    assert ours.read_share is not None
    assert ours.flops_share is not None
    assert "KeyError: 'no-such-system'" in str(unknown.error)
    assert "benchmarks.peers.setup llamacpp" in str(rival.error)
    assert said[-1] == "tiny-llama:6+4: measuring"
    assert json.loads(json.dumps(ours.to_dict()))["decode"] == pytest.approx(1 / ours.step.seconds.value)
    assert set(unknown.to_dict()) == {"workload", "system", "error"}


def test_a_base_that_fails_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(WorkerError, match="eager-bf16"):
        run(str(tmp_path / "empty"), [], prompt=2, new=2, rounds=1, priority=False, say=lambda text: None)


def test_ratios_and_shares_are_taken_inside_rounds() -> None:
    # The machine ran at half speed in the second round, its memory too.
    found = record("ours-int8", text(0.04, 0.05, 40e9), text(0.08, 0.1, 20e9))
    assert found.first_speedup.value == pytest.approx(5.0)
    assert found.step_speedup.value == pytest.approx(2.0)
    assert found.read_share is not None
    assert found.read_share.value == pytest.approx(0.5)
    assert found.flops_share == pytest.approx(4e9 / 0.06 / 800e9)
    assert record("x", text(0.1, 0.1, None), text(0.1, 0.1, None)).read_share is None


def test_the_report_shows_rates_and_errors() -> None:
    rows = [
        record("ours-int8", text(0.04, 0.05), text(0.08, 0.1)),
        Record("m:8+3", "openvino-int4", 8, "no such file"),
    ]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(report.table("a title", rows))
    shown = capture.get()
    assert "openvino-int4 failed: no such file" in shown
    assert report.cells(rows[0]) == ("ours-int8", "133", "8%", "5.00x", "13.3", "38%", "2.00x", "60.0", "40")
    assert "800 GOP/s int8" in report.note(rows)


def test_every_dtype_has_a_system() -> None:
    dtypes = {dtype for name, (dtype, _) in systems.SYSTEMS.items() if name.startswith("ours-")}
    assert dtypes == set(DTYPES) - {"auto"}
    assert systems.DEFAULT[0] == systems.BASE


def test_a_case_is_the_checkpoint_itself(checkpoint: Path, own_home: Path) -> None:
    case = cases.folder(str(checkpoint))
    assert case.parent == own_home / "bench" / "generation"
    assert (case / "model" / "config.json").read_text() == (checkpoint / "config.json").read_text()
    assert cases.folder(str(checkpoint)) == case
    (checkpoint / "config.json").write_text("{}")  # another checkpoint in the same place
    assert cases.folder(str(checkpoint)) != case
    assert cases.title(str(checkpoint)) == "tiny-llama"
    with pytest.raises(ValueError, match="SmolLM2-135M"):
        cases.folder("gpt-huge")


_LLAMA_BENCH = """#!{python}
import json, sys
option = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("loading")
tokens = int(option["-p"]) + int(option["-n"])
print(json.dumps({{"samples_ns": [tokens * 1000000], "model_size": 12345, "depth": option.get("-d")}}))
"""


def test_llama_bench_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setenv("PEER_FOLDER", str(tmp_path))
    program = build_llamacpp.program(tmp_path, "llama-bench")
    program.parent.mkdir(parents=True)
    program.write_text(_LLAMA_BENCH.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    write, facts = llamacpp.load("llamacpp-q4_0", tmp_path / "model.gguf", prompt=10, new=5, threads=1)
    assert facts == {"dtype": "int4", "step_bytes": 12345}
    first, steps = write()
    assert first == pytest.approx(0.010)
    assert steps == pytest.approx([0.001] * 4)
    program.write_text("#!/bin/sh\necho no AVX >&2; exit 3\n")
    with pytest.raises(RuntimeError, match="code 3: no AVX"):
        write()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["gpt-huge"], "SmolLM2-135M"), (["gpt2", "--systems", "ours-int3"], "llamacpp-q4_k_m")],
)
def test_bad_arguments_name_what_is_accepted(arguments: list[str], message: str) -> None:
    import typer

    app = typer.Typer()
    app.command()(generation.main)
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert message in result.output
