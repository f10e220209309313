"""What the pages say about the sources is so: paths and names exist, and the steps can be gone."""

import re
from pathlib import Path

import pytest

from hf_cpu_accel.compiler.passes import PASSES
from hf_cpu_accel.rewrite.registry import STAGES
from tests.acceptance.documents import DOCUMENTS, ROOT, blocks, title

SOURCES = ROOT / "src" / "hf_cpu_accel"
# The Python of these steps is run by test_docs.py: the toy rule is applied and undone there, the toy pass and op are called.
STEPS = ("How to add an op", "How to add a rule", "How to add a pass", "How to add a tier")


def prose(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    for block in blocks(page):
        text = text.replace(block.text, "")
    return text


def mentioned(text: str) -> set[str]:
    """Paths in backquotes: files of our kinds, and folders, which end in a slash."""
    quoted = re.findall(r"`([\w./-]+)`", text)
    return {
        path
        for path in quoted
        if re.search(r"\.(py|h|cpp|md|json|toml)$", path) or (path.endswith("/") and len(path) > 1)
    }


def find(path: str) -> Path | None:
    return next((root / path for root in (SOURCES, ROOT) if (root / path).exists()), None)


@pytest.mark.parametrize("page", DOCUMENTS, ids=title)
def test_every_path_exists(page: Path) -> None:
    text = prose(page)
    missing = {path for path in mentioned(text) if find(path) is None and not path.startswith("build/")}
    assert not missing


def section(title: str) -> str:
    text = prose(ROOT / "docs" / "explanation" / "architecture.md")
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("title", STEPS)
def test_steps_name_what_is_there(title: str) -> None:
    """Each step is numbered, and a name beside a file stands in that file."""
    text = section(title)
    steps = re.findall(r"^(\d+)\. ", text, re.MULTILINE)
    assert steps == [str(number) for number in range(1, len(steps) + 1)]
    assert len(steps) >= 4
    named = re.findall(r"`([A-Za-z_]\w*)` (?:of|in)\s+`([\w./]+\.\w+)`", text)
    for name, path in named:
        found = find(path)
        assert found is not None, path
        assert re.search(rf"\b{name}\b", found.read_text(encoding="utf-8")), (name, path)


def test_a_tier_is_told_of_wherever_the_steps_say() -> None:
    hardware = (SOURCES / "runtime" / "hardware.py").read_text(encoding="utf-8")
    kernels = (SOURCES / "csrc" / "kernels.h").read_text(encoding="utf-8")
    dispatch = (SOURCES / "csrc" / "dispatch.cpp").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "explanation" / "how-it-works.md").read_text(encoding="utf-8")
    setup = (ROOT / "setup.py").read_text(encoding="utf-8").split("X86_TIERS = {")[1].split("\n}")[0]
    tiers = re.findall(r'^    "(\w+)": \(', setup, re.MULTILINE)
    assert len(tiers) >= 5
    for tier in tiers:
        assert f'"{tier}"' in hardware
        assert f"kernels_{tier}()" in kernels
        assert f'"{tier}"' in dispatch
        assert f"| `{tier}` |" in page


def test_the_stages_of_the_page_are_those_that_run() -> None:
    """In their order, each in the file that its function is from, unless that is the registry's own."""
    rows = re.findall(r"^\| ([a-z][\w -]*) \| (.*?) \|", section("The stages"), re.MULTILINE)[1:]
    assert [name for name, _ in rows] == [stage.name for stage in STAGES]
    for (_, where), stage in zip(rows, STAGES, strict=True):
        module = stage.apply.__module__.removeprefix("hf_cpu_accel.").replace(".", "/") + ".py"
        assert module == "rewrite/registry.py" or module in mentioned(where)


def test_the_passes_of_the_page_are_those_that_run() -> None:
    text = (
        (ROOT / "docs" / "reference" / "compiler-passes.md")
        .read_text(encoding="utf-8")
        .split("\n## Passes\n")[1]
        .split("\n## ")[0]
    )
    told = [
        name
        for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    ]
    assert sorted(told) == sorted(set(PASSES))


def test_the_words_of_the_glossary_are_in_order_and_used() -> None:
    text = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| ([a-z][\w ]*) \|", text, re.MULTILINE)[1:]
    assert words == sorted(words)
    assert len(words) == len(set(words))
