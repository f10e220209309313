"""A language model trained in seconds: the same recipe as the real one, and the dtypes measured on it."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import lm_text, perplexity, train_lm
from hf_cpu_accel.config import DTYPES

_RECIPE = train_lm.Recipe(
    vocabulary=320, hidden=64, intermediate=192, layers=2, heads=2, kv_heads=1, context=48, batch=8, steps=40
)
_PLAN = perplexity.Plan(context=48, read=12, written=3, prompt=12, greedy_prompts=2, greedy_new=40)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources enough for some seconds of training."""
    folder = tmp_path_factory.mktemp("library")
    for path in sorted((Path(lm_text.__file__).parents[1] / "src" / "hf_cpu_accel").rglob("*.py")):
        (folder / f"{path.parent.name}_{path.name}").write_text(path.read_text(encoding="utf-8"))
    return folder


@pytest.fixture(scope="module")
def trained(library: Path) -> tuple:
    torch.set_num_threads(1)
    losses: list[float] = []
    text = lm_text.corpus(library)
    model, tokenizer = train_lm.train(text.train, _RECIPE, lambda step, loss: losses.append(loss))
    return model, tokenizer, losses, text


def test_training_learns_and_repeats_itself(trained: tuple) -> None:
    model, _, losses, text = trained
    assert len(losses) == _RECIPE.steps
    assert losses[-1] < losses[0] - 0.7
    again: list[float] = []
    short = train_lm.Recipe(**{**vars(_RECIPE), "steps": 2})
    for _ in range(2):
        train_lm.train(text.train[:8], short, lambda step, loss: again.append(loss))
    assert again[:2] == again[2:]
    assert not model.training


def test_held_out_text_is_not_trained_on(library: Path) -> None:
    text = lm_text.corpus(library)
    assert text.held_out
    assert not set(text.held_out) & set(text.train)
    assert text == lm_text.corpus(library)
    (library / "encodings").mkdir(exist_ok=True)
    (library / "encodings" / "table.py").write_text("TABLE = 1\n")
    assert lm_text.corpus(library) == text
    with pytest.raises(ValueError, match="too few"):
        lm_text.corpus(library / "encodings")


def test_the_tokenizer_gives_the_text_back(trained: tuple) -> None:
    _, tokenizer, _, _ = trained
    text = "def naïve(x):\n\treturn x  # ½"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_every_dtype_is_near_float32_which_writes_the_same_tokens(trained: tuple) -> None:
    model, tokenizer, _, text = trained
    ids = train_lm.windows(tokenizer, text.held_out, _PLAN.context, _PLAN.read + _PLAN.written)
    dtypes = [dtype for dtype in DTYPES if dtype != "auto"]
    results = {r.system: r for r in perplexity.evaluate(model, ids, dtypes, _PLAN)}
    assert results["eager-fp32"].reading < 0.6 * tokenizer.vocab_size  # it knows something
    ours = results["ours-float32"]
    assert ours.greedy == 1
    assert ours.met
    for dtype in dtypes:
        result = results[f"ours-{dtype}"]
        # Loose: these few tokens of a model this small say little.
        assert abs(result.reading_ratio - 1) < 2 * perplexity.BARS[dtype], dtype
        assert abs(result.writing_ratio - 1) < 2 * perplexity.BARS[dtype], dtype
    for kv_cache, bar in perplexity.CACHE_BARS.items():
        result = results[f"ours-float32-{kv_cache}-cache"]
        assert result.reading_ratio == ours.reading_ratio  # reading keeps no keys
        assert 0 < abs(result.writing_ratio - ours.writing_ratio) < 2 * bar, kv_cache


def test_dictated_text_costs_what_reading_it_costs(trained: tuple) -> None:
    model, tokenizer, _, text = trained
    ids = train_lm.windows(tokenizer, text.held_out, 24, 2)
    assert perplexity.writing(model, ids, 1) == pytest.approx(perplexity.reading(model, ids), rel=1e-4)


def test_a_missed_bar_ends_with_code_1(
    trained: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer, _, text = trained
    model.save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    monkeypatch.setattr(perplexity, "corpus", lambda: text)
    monkeypatch.setattr(perplexity, "Plan", lambda: _PLAN)
    monkeypatch.setitem(perplexity.BARS, "bfloat16", 0.0)
    folder = tmp_path / "results"
    folder.mkdir()
    out = tmp_path / "out.jsonl"
    result = CliRunner().invoke(
        _app(),
        [
            *("--folder", str(tmp_path / "lm"), "--dtypes", "float32,bfloat16", "--threads", "1"),
            *("--out", str(out), "--record", str(folder)),
        ],
    )
    assert result.exit_code == 1, result.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["system"], row["met"]) for row in rows] == [
        ("eager-fp32", None),
        ("eager-bf16", None),
        ("ours-float32", True),
        ("ours-bfloat16", False),
        *((f"ours-float32-{kv_cache}-cache", True) for kv_cache in perplexity.CACHE_BARS),
    ]
    (page,) = folder.glob("*.md")
    assert "| ours-bfloat16 |" in page.read_text()


def test_a_missing_model_names_the_command_that_makes_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(_app(), ["--folder", str(tmp_path)], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "benchmarks.train_lm" in result.output


def _app() -> object:
    import typer

    app = typer.Typer()
    app.command()(perplexity.main)
    return app
