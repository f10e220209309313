"""What Hugging Face Spaces read of each folder: the header of its README, its requirements, its app.py."""

import ast
import re
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest
from huggingface_hub import SpaceCard
from packaging.requirements import Requirement

from tests.spaces.folders import FOLDERS, ROOT, SPACES

# Of the extra `spaces`.
GRADIO = Requirement(re.search(r'"(gradio[^"]*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1])
OURS = {"hf_cpu_accel[spaces]", "hf-cpu-accel[spaces]"}
PACKAGES = {"sklearn": "scikit-learn", "PIL": "pillow", "torch_geometric": "torch-geometric"}
# What hf_cpu_accel and its extra `spaces` bring, besides the standard library.
BROUGHT = {
    "hf_cpu_accel",
    "torch",
    "transformers",
    "numpy",
    "gradio",
    "matplotlib",
    "tqdm",
    "safetensors",
    "PIL",
}


def requirements(space):
    lines = (FOLDERS / space / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def imports(path):
    """Top names of what a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


@pytest.mark.parametrize("space", SPACES)
def test_header(space):
    header = SpaceCard((FOLDERS / space / "README.md").read_text(encoding="utf-8")).data
    assert header.sdk == "gradio"
    assert header.app_file == "app.py"
    assert header.license == "apache-2.0"
    assert header.title
    assert len(header.short_description) <= 60, "Spaces refuse longer ones"
    assert header.colorFrom in {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}
    assert GRADIO.specifier.contains(header.sdk_version)
    assert isinstance(header.python_version, str), "3.10 without quotes is the number 3.1"


@pytest.mark.parametrize("space", SPACES)
def test_requirements_name_what_is_imported(space):
    found = requirements(space)
    assert any(str(requirement) in OURS for requirement in found)
    named = {requirement.name.replace("-", "_") for requirement in found}
    own = {path.stem for path in (FOLDERS / space).glob("*.py")}
    for path in (FOLDERS / space).glob("*.py"):
        if path.stem == "train":  # is not run by the Space; it names its own
            continue
        for name in set(imports(path)) - own - BROUGHT - sys.stdlib_module_names:
            assert PACKAGES.get(name, name).replace("-", "_") in named, f"{path.name} imports {name}"


@pytest.mark.parametrize("space", SPACES)
def test_versions_in_requirements_admit_those_that_are_tested(space):
    for requirement in requirements(space):
        try:
            assert requirement.specifier.contains(version(requirement.name), prereleases=True)
        except PackageNotFoundError:
            continue  # packages of weights, which only `make test-spaces` has
