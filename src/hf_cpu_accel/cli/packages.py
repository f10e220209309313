"""Find installed host packages, and packages that they import, that fail to import."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec

# The files that define the accelerated classes. A package that loads lazily fails when these are imported.
PACKAGES: dict[str, tuple[str, ...]] = {
    "torchvision": ("torchvision",),
    "torchaudio": ("torchaudio",),
    "accelerate": ("accelerate",),
    "peft": ("peft",),
    "transformers": (
        "transformers.modeling_utils",
        "transformers.generation.utils",
        "transformers.pipelines",
    ),
    "diffusers": ("diffusers.models.modeling_utils", "diffusers.pipelines.pipeline_utils"),
    "sentence_transformers": ("sentence_transformers",),
    "optimum": ("optimum.modeling_base",),
    "torch_geometric": ("torch_geometric.nn",),
}

# Prints a line of JSON before each file, and another after a file that fails. If the process dies, the last file is the cause.
_PROGRAM = """
import importlib, json, sys
output, sys.stdout = sys.stdout, sys.stderr
for name in sys.argv[1:]:
    print(json.dumps([name, None]), file=output, flush=True)
    try:
        importlib.import_module(name)
    except BaseException as error:
        while error.__cause__ is not None:
            error = error.__cause__
        print(json.dumps([name, f"{type(error).__name__}: {error}"]), file=output, flush=True)
print(json.dumps(["", None]), file=output, flush=True)
"""


def import_failures(packages: Iterable[str] = tuple(PACKAGES)) -> dict[str, str]:
    """Return the first exception of each of `packages` that is installed and fails to import: `{file: "type: message"}`.

    A separate process imports them, so that a failure, even a signal, does not affect this process.
    """
    installed = [package for package in packages if find_spec(package) is not None]
    files = [file for package in installed for file in PACKAGES[package]]
    process = subprocess.run([sys.executable, "-c", _PROGRAM, *files], capture_output=True, text=True)
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    failures: dict[str, str] = {}
    for file, error in lines:
        if error is not None:
            failures[file] = error
    last = lines[-1][0] if lines else ""
    if last and last not in failures:
        failures[last] = f"its import ended the process with code {process.returncode}"
    return failures
