"""Rivals: their environments, the cases they are given, and the summary; without any of them installed."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks import launch, systems, workloads
from benchmarks.driver import WorkerError
from benchmarks.harness import Record, run
from benchmarks.peers import cases, conversion, registry, setup, summary
from benchmarks.peers import run as peers_run
from hf_cpu_accel.measure import Agreement, Timing
from tests.benchmarks.conversions import fail, write_once


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(tmp_path))
    return tmp_path


def record(system: str, *rounds: float) -> Record:
    base = Timing(((0.2,),) * len(rounds))
    return Record(
        "bert-tiny:1x8", system, None, Timing(tuple((r,) for r in rounds)), base, Agreement(1.0, 0.0)
    )


def test_every_contestant_can_be_started() -> None:
    for ours, rivals in registry.CONTESTS.values():
        assert ours in systems.SYSTEMS
        for rival in rivals:
            assert rival in systems.SYSTEMS or rival in registry.PEERS
    started = [*registry.PEERS.values(), *registry.GENERATORS.values()]
    environments = {environment for environment, _ in started} | set(registry.SERVERS.values())
    assert environments == set(setup.NAMES)
    for _, module in started:
        assert (Path(setup.__file__).parent / f"{module}.py").exists()


def test_requirements_are_pinned_to_one_torch() -> None:
    for name in setup.NAMES:
        lines = (Path(setup.__file__).parent / "requirements" / f"{name}.txt").read_text().splitlines()
        packages = [line for line in lines if not line.startswith("#")]
        assert "torch==2.13.0" in packages
        assert all(re.fullmatch(r"[\w.-]+(\[[\w,]+\])?==[\w.]+", package) for package in packages)


@pytest.mark.usefixtures("forked_workers", "no_probes")
def test_a_rival_without_environment_is_a_row_with_the_remedy(own_home: Path) -> None:
    with pytest.raises(WorkerError, match="setup openvino"):
        launch.start("bert-tiny:1x8", "openvino-int8", 1)
    options = {"rounds": 1, "calls": 1, "seconds": 0.0, "threads": 1, "priority": False}
    base, rival = run("bert-tiny:1x8", ["openvino-int8"], **options, say=lambda text: None)
    assert base.timing is not None
    assert "has no environment" in str(rival.error)
    folder = own_home / "peers" / "openvino"
    folder.mkdir(parents=True)
    (folder / "requirements.txt").write_text("torch==1.0\n")
    assert "other versions" in str(setup.missing("openvino"))


def test_a_case_holds_the_very_model_and_inputs() -> None:
    from transformers import AutoModel

    name = "bert-tiny:2x3-5"
    case, workload = cases.folder(name), workloads.parse(name)
    model = workload.build()
    loaded = AutoModel.from_pretrained(case.parent)
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key
    expected = workload.inputs(model)
    for key, array in conversion.inputs(case).items():
        assert np.array_equal(array, expected[key].numpy())
    batches = conversion.calibration(case)
    assert {batch["input_ids"].shape for batch in batches} == {(2, 5)}
    assert not any(np.array_equal(batch["input_ids"], expected["input_ids"]) for batch in batches)
    assert cases.folder("bert-tiny:1x4").parent == case.parent


def test_conversions_are_kept_and_failures_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("")
    with pytest.raises(RuntimeError, match="unsupported operator"):
        conversion.converted(tmp_path, "openvino-int8", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["count"]
    for _ in range(2):
        folder = conversion.converted(tmp_path, "openvino-int8", write_once)
        assert (folder / "model.xml").read_text() == "made"
    assert (tmp_path / "count").read_text() == "x"


def test_the_summary_compares_with_the_fastest_rival_inside_rounds() -> None:
    # The machine ran at half speed in the second round: ratios are of each round, 1.25 and 1.5.
    records = [
        record("eager-fp32", 0.2, 0.4),
        record("ours-int8", 0.04, 0.08),
        record("openvino-int8", 0.06, 0.12),
        record("torchao-int8", 0.05, 0.10),
        Record("bert-tiny:1x8", "onnxruntime-int8", error="died"),
    ]
    outcome = summary.Outcome("int8", "ours-int8", records)
    assert [rival.system for rival in outcome.rivals] == ["torchao-int8", "openvino-int8"]
    assert outcome.over_eager == pytest.approx(5.0)
    assert outcome.over("") == pytest.approx(1.25)
    assert outcome.over("openvino") == pytest.approx(1.5)
    assert outcome.over("zentorch") is None
    assert outcome.row == ("bert-tiny:1x8", "int8", "60.0", "5.00x", "torchao-int8", "75.0", "1.25x", "1.50x")


def test_the_summary_has_means_and_survives_failures() -> None:
    slow = summary.Outcome(
        "int8",
        "ours-int8",
        [record("eager-fp32", 0.2), record("ours-int8", 0.1), record("torchao-int8", 0.05)],
    )
    fast = summary.Outcome(
        "int8",
        "ours-int8",
        [record("eager-fp32", 0.2), record("ours-int8", 0.1), record("torchao-int8", 0.8)],
    )
    failed = summary.Outcome(
        "bfloat16", "ours-bf16", [record("eager-fp32", 0.2), Record("w", "ours-bf16", error="died")]
    )
    rows = summary.rows([slow, fast, failed])
    assert ("geometric mean", "int8", "", "2.00x", "", "", "2.00x", "-") in rows
    assert rows[0][-2:] == ("0.50x slower", "-")
    assert rows[2] == ("w", "bfloat16", "failed", "-", "-", "-", "-", "-")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--precisions", "int4"], "bfloat16"), (["bert-tiny:8"], "MODEL:BATCHxTOKENS")],
)
def test_bad_arguments_name_what_is_accepted(arguments: list[str], message: str) -> None:
    import typer

    app = typer.Typer()
    app.command()(peers_run.main)
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.output
