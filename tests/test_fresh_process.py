"""What is imported when: seen in one fresh interpreter, since each takes seconds to import torch and transformers."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.children import run_child

HOSTS = ("transformers", "diffusers", "optimum", "sentence_transformers", "torch_geometric", "rich")

# One line of JSON for each step, under its name. Later steps import more, so the order counts.
PROGRAM = f"""
import json, sys

def tell(name, value):
    print(json.dumps([name, value]), flush=True)

def hosts():
    return [name for name in {HOSTS} if name in sys.modules]

import hf_cpu_accel
tell("imported", hosts())
tell("compiler imported", "torch._dynamo" in sys.modules)

import torch
model = torch.nn.Sequential(torch.nn.Linear(32, 32)).eval()
hf_cpu_accel.accelerate_for_cpu(model)
tell("accelerated", [len(hf_cpu_accel.explain(model).replaced), hosts()])

from hf_cpu_accel.cli.doctor import versions
before = set(sys.modules)
found = versions()
tell("versions", [found["torch"], sorted({{"diffusers", "optimum", "transformers"}} & (set(sys.modules) - before))])

from torch._dynamo.backends.registry import lookup_backend
listed = "hf_cpu_accel" in torch.compiler.list_backends()
loaded = "hf_cpu_accel.compiler.backend" in sys.modules
tell("backend", [listed, loaded, lookup_backend("hf_cpu_accel").__module__])

import inspect
tell("before transformers", hosts())
from transformers import AutoModel, BertModel, pipeline

def with_keyword(*functions):
    return ["cpu_optimize" in inspect.signature(function).parameters for function in functions]

there = with_keyword(AutoModel.from_pretrained, BertModel.from_pretrained, pipeline)
hf_cpu_accel.uninstall()
import transformers
gone = with_keyword(AutoModel.from_pretrained, BertModel.from_pretrained, transformers.pipeline)
tell("keyword", [there, gone])

sys.modules["optimum"] = None
try:
    from hf_cpu_accel import CPUModelForSequenceClassification
except ImportError as error:
    tell("without optimum", str(error))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    done = run_child([sys.executable, "-c", PROGRAM], cpu_seconds=120, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(line) for line in done.stdout.splitlines())


def test_the_package_imports_no_host_library(told: dict[str, Any]) -> None:
    assert told["imported"] == []


def test_the_package_does_not_import_dynamo(told: dict[str, Any]) -> None:
    assert told["compiler imported"] is False


def test_host_libraries_are_not_imported_for_a_plain_module(told: dict[str, Any]) -> None:
    assert told["accelerated"] == [1, []]


def test_versions_import_nothing(told: dict[str, Any]) -> None:
    assert told["versions"] == [importlib.metadata.version("torch"), []]


def test_the_backend_is_found_by_its_name_and_then_imported(told: dict[str, Any]) -> None:
    assert told["backend"] == [True, False, "hf_cpu_accel.compiler.backend"]


def test_the_keyword_is_there_once_transformers_is_imported(told: dict[str, Any]) -> None:
    assert "transformers" not in told["before transformers"]
    assert told["keyword"] == [[True] * 3, [False] * 3]


def test_without_optimum_the_import_says_what_to_install(told: dict[str, Any]) -> None:
    assert "pip install hf_cpu_accel[optimum]" in told["without optimum"]
