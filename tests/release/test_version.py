"""The version is that of pyproject.toml: every other file that names it is compared with it."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import hf_cpu_accel

ROOT = Path(__file__).resolve().parents[2]
(VERSION,) = re.findall(r'^version = "([^"]+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_the_package_has_the_version() -> None:
    assert metadata.version("hf_cpu_accel") == VERSION, "install the package again: `make kernels`"
    assert hf_cpu_accel.__version__ == VERSION
    assert "__version__" not in vars(hf_cpu_accel)  # read from the metadata, not written twice


def test_the_citation_has_the_version_and_the_date_of_the_changelog() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (\S+)$", citation, re.MULTILINE) == [VERSION]
    (date,) = re.findall(r"^date-released: (\S+)$", citation, re.MULTILINE)
    assert re.search(
        rf"^## \[?{re.escape(VERSION)}\]? - {date}$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )


def test_pages_name_files_of_the_version() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        names = re.findall(r"hf_cpu_accel-(\d[\w.]*?)(?:-cp310|\.tar)", page.read_text())
        assert set(names) <= {VERSION}, page
