"""The wheel in dist/, installed by pip: `make test-wheels`. Its environment is new, and has no compiler on its PATH."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import time
import venv
import zipfile
from pathlib import Path

import pytest

from tests.acceptance.documents import ROOT, blocks
from tests.acceptance.hub import make_hub

SECONDS = 60  # for README's first example, all imports and the first use of each file among them
FOLDER = ROOT / "build" / "test-wheels"
WHEELS = sorted((ROOT / "dist").glob("hf_cpu_accel-*.whl"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The wheel of this machine in a new environment; the variables of a shell in which no compiler is found."""
    (wheel,) = [path for path in WHEELS if path.stem.endswith(f"_{platform.machine()}")]
    venv.create(FOLDER, clear=True, with_pip=True, symlinks=True)
    pip = [FOLDER / "bin/pip", "install", "-q", "--disable-pip-version-check"]
    torch = [os.environ.get("TORCH", "torch==2.13.0"), *shlex.split(os.environ.get("TORCH_INDEX", ""))]
    subprocess.run([*pip, *torch], check=True)
    subprocess.run([*pip, f"{wheel}[demo]"], check=True)
    home = tmp_path_factory.mktemp("home")
    make_hub(home / "hub")
    return {"PATH": str(home), "HOME": str(home), "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}


@pytest.fixture(autouse=True)
def _nothing_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(environment: dict[str, str], *command: str) -> str:
    assert shutil.which("g++", path=environment["PATH"]) is None
    done = subprocess.run(
        [FOLDER / "bin" / command[0], *command[1:]], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_doctor_says_native(environment: dict[str, str]) -> None:
    command = "import json; from hf_cpu_accel.cli import doctor; print(json.dumps(doctor.collect()))"
    report = json.loads(run(environment, "python", "-c", command))
    found = {check["name"]: check for check in report["checks"]}
    assert found["kernels"]["status"] == "ok", found["kernels"]
    assert found["kernels"]["value"].startswith("native, ")
    assert "built for" not in found["kernels"]["value"]  # the wheel has all tiers
    assert found["compiling"]["value"].startswith("off, no C++ compiler found")


# What a reader does next with the pipeline of the first example.
CALLS = """
from hf_cpu_accel import explain, restore
text = "The film was a delight."
(fast,) = pipe(text)
print(explain(pipe))
(plain,) = restore(pipe)(text)
assert fast["label"] == plain["label"], (fast, plain)
assert abs(fast["score"] - plain["score"]) < 0.02, (fast, plain)
print("same label")
"""


def test_the_first_example_of_the_readme_runs_at_once(environment: dict[str, str]) -> None:
    """Offline, with a small model of the same name in the cache of the hub."""
    example = next(block.text for block in blocks(ROOT / "README.md") if block.language == "python")
    assert "accelerate_for_cpu(pipe)" in example
    start = time.monotonic()
    output = run(environment, "python", "-c", f"{example}\n{CALLS}")
    assert time.monotonic() - start < SECONDS
    assert "native kernels" in output
    assert "same label" in output


def test_ops_refuse_in_words(environment: dict[str, str]) -> None:
    """By an exception that passes from the extension through torch to Python."""
    program = """
import torch, hf_cpu_accel
from hf_cpu_accel import extension
assert extension.status().loaded
try:
    torch.ops.hf_cpu_accel.linear(torch.ones(2, 3), torch.ones(4), None, None, None, 5, "nonsense")
except RuntimeError as error:
    print("refused:", error)
"""
    assert "refused:" in run(environment, "python", "-c", program)


@pytest.mark.parametrize("wheel", WHEELS, ids=lambda path: path.stem.split("-")[-1])
def test_it_holds_what_runs_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "hf_cpu_accel/_C.abi3.so" in names
    assert "hf_cpu_accel/csrc/ops/tiles.h" in names  # for code that is generated where there is a compiler
    assert not [
        name for name in names if name.endswith((".cpp", ".o")) or name.startswith(("tests", "benchmarks"))
    ]
    assert wheel.stat().st_size < 20 << 20
