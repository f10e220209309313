"""What is read from a file next to a library: everything that was written, and nothing that was not."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from hf_cpu_accel.compiler import torch_private
from hf_cpu_accel.compiler.background import description
from hf_cpu_accel.compiler.background.bound import Library
from hf_cpu_accel.compiler.background.compiled import LIBRARY, Compiled, Place
from hf_cpu_accel.compiler.background.reads import Read
from hf_cpu_accel.compiler.bind import Request
from hf_cpu_accel.compiler.report import GraphReport
from hf_cpu_accel.compiler.weight_transforms import (
    Composed,
    Computed,
    FoldedNorm,
    JoinedBiases,
    PackedConvolution,
    PackedLinears,
    Part,
    Value,
)

STEPS = (
    ("aten.mul.Tensor", (Value(0), 2.5), ()),
    ("aten.sum.dim_IntList", (Value(1), (0, -1)), (("keepdim", True), ("dtype", torch.float32))),
    ("aten.masked_fill.Scalar", (Value(2), Value(0), float("-inf")), ()),
)
RECIPES = (
    PackedLinears("int8"),
    JoinedBiases(((8, True), (4, False))),
    Part(PackedConvolution("float32", tiled=True), (0,)),
    Composed(PackedLinears("float32", transposed=True), ((Computed(STEPS, (8, 8), torch.bfloat16), 1), None)),
    FoldedNorm(1e-5, (True, False, True)),
)
COMPILED = Compiled(
    places=(
        Place("input", 0),
        Place("state", (("attribute", "_parameters"), ("item", "weight"), ("item", 3))),
        Place("constant", torch.tensor([1.5, float("nan")])),
        Place("constant", None),
    ),
    kept=(0, 2),
    requests=tuple(Request(recipe, (1,)) for recipe in RECIPES),
    sizes=((2, "s0", "2*s0 + 1"),),
    ranges={"s0": (2, None)},
    guards=("t0_1 % 7 == 0",),
    outputs=(0, ("constant", None), ("constant", 1.5), 1),
    spec='[1, {"type": null, "context": null, "children_spec": []}]',
    reads=(Read("0.config", "eps", "abc"),),
    sources={"package/module.py": "0123"},
    graph=GraphReport(nodes=3, rewrites={"linear": 2}, left=None, cpu_seconds=1.5),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / LIBRARY).write_bytes(b"machine code")
    description.write(COMPILED, tmp_path)
    return tmp_path


def test_all_that_was_written_is_read(folder: Path) -> None:
    found = description.read(folder)
    assert torch.equal(found.places[2].path, COMPILED.places[2].path[:]) or bool(
        found.places[2].path[1].isnan()
    )
    assert found.places[2].path[0] == 1.5
    assert found.places[:2] + found.places[3:] == COMPILED.places[:2] + COMPILED.places[3:]
    for field in (
        "kept",
        "requests",
        "sizes",
        "ranges",
        "guards",
        "outputs",
        "spec",
        "reads",
        "sources",
        "graph",
    ):
        assert getattr(found, field) == getattr(COMPILED, field)
    assert hash(found.requests) == hash(COMPILED.requests)


class Planted:
    """Unpickled, it makes a folder."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.proof),)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (description.NAME, "can't decode"),
        (description.TENSORS, "its files have changed since they were written"),
    ],
)
def test_a_pickle_is_not_run(folder: Path, name: str, reason: str) -> None:
    (folder / name).write_bytes(pickle.dumps(Planted(folder / "proof")))
    with pytest.raises(ValueError, match=reason):
        description.read(folder)
    assert not (folder / "proof").exists()


def at(*path: Any) -> Callable[[dict[str, Any], Any], None]:
    """What puts a value there."""

    def change(found: dict[str, Any], value: Any) -> None:
        target: Any = found["compiled"]["Compiled"]
        for step in path[:-1]:
            target = target[step]
        target[path[-1]] = value

    return change


STEP = ("requests", 3, "Request", "recipe", "Composed", "inner", 0, 0, "Computed", "steps", 0, 0)


@pytest.mark.parametrize(
    ("change", "value"),
    [
        (at("kept", 0), 1 << 70),
        (at("kept", 0), -1),
        (at("kept", 0), 4),
        (at("kept", 0), True),
        (at("kept", 0), "0"),
        (at("kept"), 3),
        (at("requests", 0, "Request", "positions"), [99]),
        (at("requests", 0), {"Popen": {"args": "true"}}),
        (at("requests", 0), {"Read": {"path": "", "name": "", "digest": ""}}),
        (at("requests", 0, "Request", "recipe"), {"dtype": "float32"}),
        (at("requests", 0, "Request", "more"), 1),
        (at("places", 1, "Place", "path"), [["call", "__reduce__"]]),
        (at("places", 1, "Place", "path"), [["attribute", ["x"]]]),
        (at("places", 0, "Place", "kind"), "file"),
        (at("places", 2, "Place", "path"), {"tensor": "../../x"}),
        (at("places", 2, "Place", "path"), {"dtype": "load"}),
        (at("places", 2, "Place", "path"), {"float": "1e400"}),
        (at("places", 2, "Place", "path"), {}),
        (at("ranges"), {"s0": [2, None]}),
        (at("ranges"), {"dict": {"s0": [2]}}),
        (at("outputs", 1), ["constant"]),
        (at(*STEP), "load_library"),
        (at(*STEP), "aten.mul"),
        (at(*STEP), "aten.mul_.Tensor"),
        (at(*STEP), "aten.from_file.default"),
        (at(*STEP), "aten.mul.Tensor.__class__"),
        (at(*STEP), "hf_cpu_accel.linear.default"),
        (at(*STEP), "aten.there_is_none.default"),
    ],
)
def test_what_is_no_description_is_refused(
    folder: Path, change: Callable[[dict[str, Any], Any], None], value: Any
) -> None:
    path = folder / description.NAME
    found = json.loads(path.read_text())
    change(found, value)
    path.write_text(json.dumps(found))
    with pytest.raises((ValueError, TypeError, AttributeError)):
        description.read(folder)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "NaN",
        "[" * 100_000,
        '{"format": 1}',
        '{"format": 2, "hashes": {}, "compiled": null}',
        '{"format": ' + "9" * 10_000 + "}",
        "\udcff",
    ],
    ids=lambda text: text[:12],
)
def test_damaged_text_is_refused(folder: Path, text: str) -> None:
    (folder / description.NAME).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises((ValueError, RecursionError)):
        description.read(folder)


@pytest.mark.parametrize("name", [description.NAME, description.TENSORS, LIBRARY])
def test_files_that_are_cut_off_or_missing_are_refused(folder: Path, name: str) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"Expecting|its files have changed since they were written"):
        description.read(folder)
    path.unlink()
    with pytest.raises(OSError, match=name):
        description.read(folder)


def test_tensors_of_another_artifact_are_refused(folder: Path) -> None:
    safetensors.torch.save_file({"0": torch.zeros(2)}, folder / description.TENSORS)
    with pytest.raises(ValueError, match="its files have changed since they were written"):
        description.read(folder)


def test_what_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    (tmp_path / LIBRARY).write_bytes(b"")
    with pytest.raises(TypeError, match=r"Path cannot be written to block\.json"):
        description.write(replace(COMPILED, outputs=(("constant", tmp_path),)), tmp_path)


@pytest.mark.parametrize("sizes", [((2, "__import__('os')"),), ((2, "s9 + 1"),), ((2, "s0", "s0 s0"),)])
def test_a_library_of_other_formulas_is_not_loaded(tmp_path: Path, sizes: Any) -> None:
    with pytest.raises(ValueError, match=r"expression|unknown sizes"):
        Library(replace(COMPILED, sizes=sizes), tmp_path)


@pytest.mark.parametrize("guard", ["L['args'][0].size()[0] > 2", "t0_3 > 2", "open('x')", "t0_0.real"])
def test_a_library_of_other_guards_is_not_loaded(tmp_path: Path, guard: str) -> None:
    with pytest.raises(ValueError, match=r"expression|unknown sizes"):
        Library(replace(COMPILED, guards=(guard,)), tmp_path)


@pytest.mark.parametrize(
    ("kind", "context"),
    [
        (
            "collections.defaultdict",
            {"default_factory_module": "this", "default_factory_name": "s", "dict_context": []},
        ),
        ("builtins.dict", '[{"__enum__": true, "fqn": "this:s", "name": "x"}]'),
        ("builtins.dict", '[{"_\\u005fenum__": true, "fqn": "this:s", "name": "x"}]'),
    ],
)
def test_a_nesting_imports_nothing(kind: str, context: Any) -> None:
    leaf = {"type": None, "context": None, "children_spec": []}
    inner = {"type": kind, "context": context, "children_spec": [leaf]}
    spec = [1, {"type": "builtins.tuple", "context": "null", "children_spec": [leaf, inner]}]
    with pytest.raises(ValueError, match="a nesting that imports classes"):
        torch_private.nested(json.dumps(spec))
