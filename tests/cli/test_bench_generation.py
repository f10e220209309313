"""`hf-cpu-accel bench --task text-generation`: what it runs, what it reports, and how it refuses."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner, Result

from hf_cpu_accel.cli.bench import contest as bench_contest
from hf_cpu_accel.cli.bench import generation_measure, generation_report, generation_workload
from hf_cpu_accel.cli.main import app
from hf_cpu_accel.config import DTYPES
from hf_cpu_accel.measure import Estimate
from hf_cpu_accel.measure.generation import Generated


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "--task", "text-generation", *arguments], env={"COLUMNS": "200"})


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    folder = tmp_path / "tiny-llama"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_offline_run_writes_table_json_and_chart(tiny: Path, tmp_path: Path) -> None:
    out, chart = tmp_path / "out.json", tmp_path / "out.png"
    result = run(
        *(str(tiny), "--dtypes", "float32,int8,int4", "--batch", "2", "--prompt", "9", "--new", "5"),
        *("--repeats", "2", "--json", str(out), "--plot", str(chart)),
    )
    assert result.exit_code == 0, result.output
    assert "tiny-llama, text-generation, 2 x 9 tokens, 5 new" in result.output
    document = json.loads(out.read_text())
    assert document["workload"] == {
        "model": "tiny-llama",
        "task": "text-generation",
        "batch": 2,
        "prompt": 9,
        "new": 5,
    }
    systems = {system["system"]: system for system in document["systems"]}
    assert list(systems) == ["eager float32", "eager bfloat16", "float32", "int8", "int4"]
    layers, head = 2 * (64 * (64 + 64) + 64 * 64 + 3 * 64 * 160), 512 * 64
    weights = layers + head
    assert systems["float32"]["step_bytes"] == systems["eager float32"]["step_bytes"] == 4 * weights
    assert systems["eager bfloat16"]["step_bytes"] == 2 * weights
    assert weights < systems["int8"]["step_bytes"] < 1.2 * weights  # scales weigh more where rows are short
    at_least = layers / 2 + head  # which has 8 bits
    assert at_least < systems["int4"]["step_bytes"] < 1.3 * at_least
    assert min(system["step_speedup"]["value"] for system in list(systems.values())[:2]) <= 1.0
    for system in systems.values():
        assert system["prefill"] == pytest.approx(2 * 9 / system["first"]["value"])
        assert system["decode"] == pytest.approx(2 / system["step"]["value"])
        assert system["flops_share"] > 0
        assert system["read_share"] > 0
        assert [len(one["steps"]) for one in system["runs"]] == [4, 4]
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_every_narrow_dtype_is_measured_by_default() -> None:
    chosen = bench_contest.contest(
        None,
        "gpt2",
        "text-generation",
        batch=1,
        seq=None,
        prompt=None,
        new=None,
        dtypes=None,
        eager=None,
    )
    assert chosen.facts["prompt"] == 128
    assert chosen.facts["new"] == 64
    assert chosen.systems == 2 + len(DTYPES) - 2


def test_an_encoder_decoder_is_loaded_with_its_own_head(tmp_path: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM, T5Config

    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=3
    )
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path)
    workload = generation_workload.workload(str(tmp_path), None, batch=1, prompt=5, new=4)
    model = workload.build()
    assert model.generation_config.decoder_start_token_id == 3
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    (result,) = generation_measure.measure(workload, [], ["bfloat16"], repeats=1, threads=1)
    assert result.decode > 0


def test_the_table_fits_a_terminal_and_labels_slower_systems() -> None:
    def estimate(value: float) -> Estimate:
        return Estimate(value, value, value)

    def row(system: str, ratio: float) -> generation_measure.Result:
        return generation_measure.Result(
            system=system,
            eager=system.startswith("eager"),
            prefill=1234.5,
            decode=98.76,
            first=estimate(0.1234),
            step=estimate(0.0101),
            first_speedup=estimate(ratio),
            step_speedup=estimate(ratio),
            step_bytes=10**9,
            flops_share=0.876,
            read_share=None,
            peak_bytes=2_470_000_000,
            ready_seconds=1.0,
            runs=(Generated(0.1234, (0.0101,)),),
        )

    console = Console(width=80)
    with console.capture() as capture:
        console.print(generation_report.table([row("eager bfloat16", 1.0), row("int8", 0.5)], "t", "c"))
    shown = capture.get()
    assert "…" not in shown
    for text in ("0.50x slower", "1234", "98.8", "88%", "123", "2470"):
        assert text in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--random-config", "gpt2", "--seq", "12"], "--prompt"),
        (["--random-config", "gpt2", "--dtypes", "float31"], "float32"),
        (["--random-config", "gpt2", "--eager", "int8"], "bfloat16"),
        (["--random-config", "gpt2", "--dtypes", ","], "--dtypes"),
        (["--random-config", "gpt2", "--new", "1"], "--new"),
        (["--random-config", "distilbert-base-uncased"], "does not generate text"),
        (["--random-config", "gpt-huge"], "SmolLM2-135M"),
        ([], "--random-config"),
    ],
)
def test_bad_arguments_name_what_is_accepted(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_generation_options_are_rejected_for_other_tasks() -> None:
    result = CliRunner().invoke(
        app, ["bench", "--random-config", "bert-tiny", "--new", "5"], env={"COLUMNS": "200"}
    )
    assert result.exit_code == 2
    assert "--task text-generation" in result.output


def test_more_tokens_than_positions_are_rejected(tiny: Path) -> None:
    result = run(str(tiny), "--prompt", "60", "--new", "5", "--repeats", "1")
    assert result.exit_code == 1
    assert "prompt=60, new=5: the model has positions for 64 tokens; pass fewer" in result.output


def test_copies_that_do_not_fit_in_memory_are_rejected(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 1000

    monkeypatch.setattr(generation_measure.psutil, "virtual_memory", Memory)
    result = run(str(tiny), "--prompt", "6", "--new", "5", "--repeats", "1")
    assert result.exit_code == 1
    assert "--eager bfloat16" in result.output
