"""README and docs as a reader meets them: all Python runs as it stands, commands, options and links exist, figures are there."""

import os
import re
from itertools import pairwise
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from hf_cpu_accel.cli.main import app
from tests.acceptance.documents import DOCUMENTS, ROOT, blocks, python_script, title
from tests.acceptance.hub import MINILM, SENTIMENT
from tests.programs import run_program

# A server with one model, which the client of `openai` calls without a port.
SERVER = """
import functools
import openai
from starlette.testclient import TestClient
from hf_cpu_accel.serve.http.app import Service
from hf_cpu_accel.serve.http.metrics import Metrics
from hf_cpu_accel.serve.loading import Settings, load
from hf_cpu_accel.serve.models import Models
metrics = Metrics()
client = TestClient(Service(Models([load({model!r}, metrics, Settings())]), metrics).app)
openai.OpenAI = functools.partial(openai.OpenAI, http_client=client)
"""
# What a page takes as given: "your own" models and data, which the test has to bring.
GIVEN = {
    "how-to/vision-and-speech.md": "from PIL import Image\nImage.new('RGB', (64, 48)).save('street.jpg')",
    "how-to/gnn.md": """
import numpy, torch
from torch_geometric.data import Data
nodes, edge_index = 50, torch.randint(50, (2, 300))
data = Data(x=torch.randn(nodes, 128), edge_index=edge_index, y=torch.randint(40, (nodes,)))
numpy.random.randn(nodes, 128).astype('float32').tofile('features.bin')
""",
    "reference/dtypes.md": f"""
from transformers import AutoModelForSequenceClassification
from hf_cpu_accel import accelerate_for_cpu
model = AutoModelForSequenceClassification.from_pretrained({SENTIMENT!r})
""",
    "how-to/quantized-checkpoints.md": f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from tests.frontends.quantized_cases import write_form
from tests.frontends.gguf_files import write_file
Path('folder').mkdir()
write_form(Path('gptq-folder'), 'gptq')
write_file(Path('folder'), 'llama').rename('folder/model.Q4_1.gguf')
""",
    "reference/server.md": SERVER.format(model=MINILM),
    "tutorials/embeddings.md": SERVER.format(model=f"minilm={MINILM}"),
}
# Pages about packages that the suite lacks; `make test-adapters` runs them.
ELSEWHERE = {"how-to/other-libraries.md"}
# Pages with trained weights or their own data: their Python prints the text block that follows it, with the digits of this CPU.
SHOWN = {"tutorials/embeddings.md", "tutorials/gnn.md"}
# Languages of blocks. What is typed into a shell is held against the command's own --help: most of it takes minutes, or downloads.
LANGUAGES = {"python", "bash", "text"}
# Commands that are not ours: what they do is not for these tests to say. (tests/cli/test_optimum_cli.py is about optimum's.)
FOREIGN = ("git clone", "pip install", "pip download", "optimum-cli", "curl", "hf ")


def with_python() -> list[Path]:
    return [
        document
        for document in DOCUMENTS
        if title(document) not in ELSEWHERE and any(b.language == "python" for b in blocks(document))
    ]


def shell_lines(document: Path) -> list[str]:
    return [
        line.split("#")[0].strip()
        for block in blocks(document)
        if block.language == "bash"
        for line in block.text.splitlines()
        if line.split("#")[0].strip()
    ]


@pytest.mark.parametrize("document", with_python(), ids=title)
def test_python_runs_as_written(
    document: Path, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / f"{document.stem}.py"
    script.write_text(python_script(document), encoding="utf-8")
    start = (
        f"import runpy\n{GIVEN.get(title(document), '')}\nrunpy.run_path({str(script)!r}, dict(globals()))\n"
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(tmp_path / "home"))
    done = run_program(start, folder=tmp_path, environment=os.environ)
    assert done.returncode == 0, done.stderr
    if document.name == "README.md":
        assert "layers x6" in done.stdout or "encoder_layer" in done.stdout, done.stdout
    if title(document) in SHOWN:
        for code, output in pairwise(blocks(document)):
            if (code.language, output.language) == ("python", "text"):
                assert re.sub(r"\d", "0", output.text) in re.sub(r"\d", "0", done.stdout)
    if title(document) == "how-to/load.md":
        assert (tmp_path / "my-model" / "config.json").is_file()
        assert (tmp_path / "my-model" / "cpu_accel_config.json").is_file()


@pytest.mark.parametrize("document", DOCUMENTS, ids=title)
def test_every_block_says_what_it_is(document: Path) -> None:
    """So that none is left out of the tests; a block that is only indented would be."""
    assert {block.language for block in blocks(document)} <= LANGUAGES
    prose = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"\n\n {4}[^ -]", prose.replace("    options:", "")), "an indented block"


@pytest.mark.parametrize("document", DOCUMENTS, ids=title)
def test_commands_and_their_options_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets
    inline = re.findall(r"`((?:hf-cpu-accel|python -m) [^`\n]+)`", text)
    for line in {*shell_lines(document), *inline}:
        if line.startswith(FOREIGN):
            continue
        program, *words = line.split()
        options = {word.split("=")[0] for word in words if word.startswith("--")}
        if program == "make":
            assert words[0] in targets, line
        elif program == "hf-cpu-accel":
            result = CliRunner().invoke(app, [words[0], "--help"], env={"COLUMNS": "200"})
            assert result.exit_code == 0, result.output
            assert all(option in result.output for option in options), line
        elif program == "python" and words[0].endswith(".py"):
            script = (ROOT / words[0]).read_text(encoding="utf-8")
            assert all(f'"{option}"' in script for option in options), line
        else:
            assert (program, words[0]) == ("python", "-m"), line
            module = ROOT / words[1].replace(".", "/")
            source = (
                module.with_suffix(".py") if module.with_suffix(".py").exists() else module / "__main__.py"
            )
            code = source.read_text(encoding="utf-8") + (ROOT / "benchmarks" / "session.py").read_text()
            names = {option: option[2:].replace("-", "_") for option in options}
            assert all(option in code or f"{name}:" in code for option, name in names.items()), line


def test_the_reference_lists_all_options_of_all_commands() -> None:
    pages = [
        (ROOT / "docs" / "reference" / f"{name}.md").read_text(encoding="utf-8") for name in ("cli", "server")
    ]
    common = pages[0].split("\n## `")[0]
    for name, command in get_command(app).commands.items():
        section = pages[0].split(f"\n## `{name}`\n")[1].split("\n## ")[0]
        text = common + section + (pages[1] if name == "serve" else "")
        options = {option for parameter in command.params for option in parameter.opts if option[:2] == "--"}
        missing = {
            option for option in options if f"`{option}" not in text and f"`--no{option[1:]}" not in text
        }
        assert not missing, name


@pytest.mark.parametrize("document", DOCUMENTS, ids=title)
def test_links_and_figures_are_there(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#:\s]+)(#[a-z-]+)?\)", text):
        path = document.parent / target
        assert path.exists(), target
        # The site has nothing but its own pages.
        assert document.parent == ROOT or path.resolve().is_relative_to(ROOT / "docs"), target
        if anchor and path.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor[1:] in {heading.lower().replace(" ", "-") for heading in headings}, target + anchor


def test_the_readme_convinces_on_one_screen() -> None:
    """The first 40 lines hold the code, the picture and the table of numbers."""
    lines = DOCUMENTS[0].read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    screen = "\n".join(lines[:40])
    assert SENTIMENT in screen
    assert "accelerate_for_cpu(pipe)" in screen
    assert "docs/figures/speedups-dark.svg" in screen
    assert len(re.findall(r"^\| [^|-]", screen, re.MULTILINE)) >= 6


def test_the_docs_are_short() -> None:
    """25,000 words outside of the pages that list every model type and task."""
    generated = {"reference/models.md", "reference/tasks.md"}
    pages = [
        page for page in DOCUMENTS if page.is_relative_to(ROOT / "docs") and title(page) not in generated
    ]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 25_000
