"""The numbers that Python and the kernels share have one description, and kernels of another one are refused."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hf_cpu_accel import abi, extension
from hf_cpu_accel.ops.chain.steps import POINTWISE
from hf_cpu_accel.ops.linear import ACTIVATIONS
from hf_cpu_accel.packing.linear import FORMS
from tests.abi import HEADER, description, text

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")


def test_the_header_is_that_of_the_description() -> None:
    assert HEADER.read_text() == text(description()), "run `python -m tests.abi`, and rebuild the kernels"


def test_the_size_of_the_layouts() -> None:
    """These are what the kernels read per layer and step; adjust them with a change of the structs."""
    assert len(abi.columns(abi.LayerLayout)) == 161
    assert len(abi.columns(abi.LayerScalars)) == 22
    assert len(abi.columns(abi.StepLayout)) == 19


@pytest.mark.parametrize("struct", abi.STRUCTS, ids=lambda struct: struct.__name__)
def test_numbers_are_read_as_they_are_written(struct: type) -> None:
    row = tuple(range(len(abi.columns(struct))))
    assert abi.numbers(abi.read(struct, row)) == row
    for wrong in (row[:-1], (*row, 0)):
        with pytest.raises(ValueError, match=f"{struct.__name__} has {len(row)} numbers"):
            abi.read(struct, wrong)


def test_a_field_is_found_by_name() -> None:
    columns = abi.columns(abi.LayerLayout)
    row = [0] * len(columns)
    row[columns.index("key.stride")] = 7
    assert vars(abi.read(abi.LayerLayout, row).key) == {"first": 0, "stride": 7, "head_stride": 0}


def test_a_missing_or_unknown_field_is_an_error() -> None:
    with pytest.raises(TypeError, match="bias"):
        abi.ProjectionLayout(weight=0, scale=0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="offset"):
        abi.ProjectionLayout(weight=0, scale=0, bias=0, offset=0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        abi.ProjectionLayout(0, 0, 0)  # type: ignore[misc]


def test_each_name_has_a_number() -> None:
    assert set(ACTIVATIONS) == set(abi.ACTIVATIONS)
    assert set(POINTWISE) == set(abi.POINTWISE_ACTIVATIONS)
    assert set(FORMS) <= set(abi.WEIGHT_KINDS)


def test_the_version_changes_with_names_order_and_types() -> None:
    swapped = dataclasses.replace(abi.ENUMERATIONS[0], members=abi.ENUMERATIONS[0].members[::-1])
    fields = [(field.name, field.type) for field in dataclasses.fields(abi.HeadsLayout)]
    moved = dataclasses.make_dataclass("HeadsLayout", fields[::-1], namespace={"__module__": abi.__name__})
    floats = dataclasses.make_dataclass("HeadsLayout", [(name, float) for name, _ in fields])
    versions = {
        abi.VERSION,
        abi.version_of((swapped, *abi.ENUMERATIONS[1:]), abi.STRUCTS),
        abi.version_of(abi.ENUMERATIONS[1:], abi.STRUCTS),
        *(
            abi.version_of(abi.ENUMERATIONS, (struct, *abi.STRUCTS))
            for struct in (moved, floats, abi.HeadsLayout)
        ),
    }
    assert len(versions) == 6
    assert abi.version_of(abi.ENUMERATIONS, abi.STRUCTS) == abi.VERSION


@needs_compiler
def test_a_header_that_somebody_edits_does_not_compile(tmp_path: Path) -> None:
    source = tmp_path / "abi.cpp"
    compiles = ["g++", "-std=c++17", "-fsyntax-only", str(source)]
    source.write_text(HEADER.read_text().replace("#pragma once\n", ""))
    assert subprocess.run(compiles, capture_output=True).returncode == 0
    moved = re.sub(r"(  int64_t heads;\n)(  int64_t kv_heads;\n)", r"\2\1", source.read_text())
    longer = source.read_text().replace("  int64_t kv_heads;\n", "  int64_t kv_heads;\n  int64_t more;\n")
    for wrong in (moved, longer):
        assert wrong != HEADER.read_text().replace("#pragma once\n", "")
        source.write_text(wrong)
        refused = subprocess.run(compiles, capture_output=True, text=True)
        assert refused.returncode != 0
        assert "static assertion failed" in refused.stderr


def test_kernels_of_another_version_are_refused(tmp_path: Path) -> None:
    """The same package folder with another description: it does not import, and names both versions and the remedy."""
    package = Path(extension.__file__).parent
    copy = tmp_path / package.name
    copy.mkdir()
    for entry in package.iterdir():
        if entry.name != "abi.py":
            (copy / entry.name).symlink_to(entry)
    source = (package / "abi.py").read_text()
    (copy / "abi.py").write_text(source.replace('"relu", "silu"', '"silu", "relu"', 1))
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import hf_cpu_accel"
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert failed.returncode != 0
    last = failed.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: _C.")
    versions = re.findall(r"ABI ([0-9a-f]{12})", last)
    assert versions[0] == f"{abi.VERSION:012x}"
    assert len(set(versions)) == 2
    assert "rebuild the kernels" in last
