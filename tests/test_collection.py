"""Every module with tests is collected by `make test`, or by another target of make that CI runs."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[1]
TARGET = re.compile(r"^([\w.-]+):(?!=).*\n((?:\t.*\n?)*)", re.MULTILINE)
# What pytest collects in a folder that it is given; the settings in pyproject.toml leave it as it is.
COLLECTED = "test_*.py"


def recipes(makefile: str) -> dict[str, str]:
    """Return {target: its recipe as one text}."""
    return {name: recipe.replace("\\\n", " ") for name, recipe in TARGET.findall(makefile)}


def pytest_paths(recipe: str) -> tuple[list[str], list[str]]:
    """Return the files and folders that a recipe gives pytest, and those that it ignores; all tests if it gives none.

    Paths inside of another repository's folder are left out.
    """
    paths: list[str] = []
    ignored: list[str] = []
    for line in recipe.splitlines():
        if "-m pytest" not in line or 'cd "' in line:
            continue
        words = line.partition("-m pytest")[2].split("||")[0].split()
        ignored += [word for before, word in pairwise(words) if before == "--ignore"]
        named = [
            word for word in words if re.match(r"(tests|integrations)(/|$)", word) and word not in ignored
        ]
        paths += named or ["tests"]
    return paths, ignored


def collects(path: str, module: str) -> bool:
    """Return whether pytest collects a module if it is given a path."""
    if path == module:
        return True
    return PurePosixPath(module).is_relative_to(path) and fnmatch(PurePosixPath(module).name, COLLECTED)


def targets_of(module: str, makefile: str) -> set[str]:
    """Return the targets of make that collect a module."""
    found = set()
    for name, recipe in recipes(makefile).items():
        paths, ignored = pytest_paths(recipe)
        if any(collects(path, module) for path in paths) and not any(
            PurePosixPath(module).is_relative_to(path) for path in ignored
        ):
            found.add(name)
    return found


def targets_of_ci() -> set[str]:
    """Return the targets that .ci/run and the workflows name."""
    files = [ROOT / ".ci" / "run", *(ROOT / ".github" / "workflows").glob("*.yml")]
    texts = [file.read_text(encoding="utf-8") for file in files]
    commands = [name for text in texts for name in re.findall(r"\bmake ([\w-]+)", text)]
    # Of a matrix: `- plans` in a list, and `- target: test-pyg`.
    listed = [
        name for text in texts for name in re.findall(r"^ +- (?:target: )?([\w-]+)$", text, re.MULTILINE)
    ]
    return {*commands, *listed}


def modules() -> list[str]:
    """Return the files with test functions."""
    files = [file for folder in ("tests", "integrations") for file in (ROOT / folder).rglob("*.py")]
    pattern = re.compile(r"^(?:    )?(?:async )?def test_", re.MULTILINE)
    return sorted(
        str(file.relative_to(ROOT)) for file in files if pattern.search(file.read_text(encoding="utf-8"))
    )


def test_every_module_is_run_by_ci() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    in_ci = targets_of_ci()
    found = modules()
    assert len(found) > 400
    missing = {module: targets for module in found if not (targets := targets_of(module, makefile)) & in_ci}
    assert not missing


def test_targets_that_ci_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    workflow = (ROOT / ".github" / "workflows" / "weekly.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ +- (?:target: )?([\w-]+)$", workflow, re.MULTILINE)
    assert len(listed) > 10
    assert set(listed) <= set(recipes(makefile))


MAKEFILE = """
test: kernels
\tpython -m pytest -q --ignore tests/slow

test-slow:
\tpip install x
\tpython -m pytest -q -m "not serial" tests/slow

named:
\tPYTHONPATH=x python -m pytest -q tests/formats.py tests/other

elsewhere:
\tcd "$(SOURCE)" && python -m pytest -q tests/formats.py
"""


@pytest.mark.parametrize(
    ("module", "targets"),
    [
        ("tests/a/test_b.py", {"test"}),
        ("tests/slow/test_b.py", {"test-slow"}),
        ("tests/formats.py", {"named"}),
        ("tests/other/test_a.py", {"test", "named"}),
        ("tests/other/a.py", set()),
        ("integrations/test_a.py", set()),
    ],
)
def test_targets_of_a_module(module: str, targets: set[str]) -> None:
    assert targets_of(module, MAKEFILE) == targets
