"""The golden files of plans: how rows and differences read, and that the plans of some models are those of the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_cpu_accel.plan import Plan, PlanItem
from tests.plans import __main__ as command
from tests.plans import golden
from tests.plans.rows import expand, lines, rows_of
from tests.plans.subjects import GROUPS, Inspection, group_of, names

# Encoders, a decoder, experts, states, recorded layers, windows, convolutions, a graph layer, a network without a library.
MODELS = (
    *("bert", "deberta-v2", "gpt2", "mamba", "mixtral", "resnet", "swin", "t5", "xlnet", "llama4"),
    *("pyg.GATConv", "torchbench.squeezenet1_1", "huggingface.RobertaForCausalLM"),
)


def plan(*items: PlanItem) -> Plan:
    return Plan(items, "float32", "avx2", 2, "one per core", "native")


def packed(name: str, dtype: str = "float32", nbytes: int = 8) -> PlanItem:
    return PlanItem(name, "linear", "linear", dtype, nbytes, None)


def text(**plans: Plan) -> list[str]:
    return lines({dtype: rows_of(one) for dtype, one in plans.items()})


def test_numbers_of_paths_are_one_row() -> None:
    norm = PlanItem.left("layer.0.norm", "Norm", "its  own\nforward")
    items = packed("layer.0.query"), packed("layer.1.query"), norm, packed("layer2.query")
    assert text(float32=plan(*items)) == [
        "layer.*.norm | Norm | left: its own forward",
        "layer.*.query x2, layer2.query | linear | linear | float32",
    ]


def test_neither_the_order_of_rows_nor_their_bytes_matter() -> None:
    items = packed("a"), packed("b.1"), packed("b.0", nbytes=4)
    assert text(float32=plan(*items)) == text(float32=plan(*reversed(items)))


def test_rows_of_two_dtypes_are_one_line_where_they_differ_by_the_dtype_alone() -> None:
    wide = plan(packed("query"), packed("head"), PlanItem.left("norm", "Norm", "as it is"), packed(""))
    narrow = plan(
        packed("query", "int8"),
        PlanItem.left("head", "Linear", "too few features"),
        PlanItem.left("norm", "Norm", "as it is"),
        packed(""),
    )
    assert text(float32=wide, int8=narrow) == [
        "(the model) | linear | linear | float32",
        "int8: head | Linear | left: too few features",
        "float32: head | linear | linear | float32",
        "norm | Norm | left: as it is",
        "query | linear | linear | float32/int8",
    ]


def test_rows_that_differ_by_their_paths_are_one_line_and_are_compared_one_by_one() -> None:
    found = text(float32=plan(*map(packed, ("a.0.key", "a.0.query", "a.1.key", "a.1.query", "b", ""))))
    assert found == ["(the model), a.*.{key,query} x2, b | linear | linear | float32"]
    assert expand(found) == [
        "(the model) | linear | linear | float32",
        "a.*.key x2 | linear | linear | float32",
        "a.*.query x2 | linear | linear | float32",
        "b | linear | linear | float32",
    ]
    assert expand(["int8: a.{b,c}, d | Norm | left: one, two {x, y}"]) == [
        "int8: a.b | Norm | left: one, two {x, y}",
        "int8: a.c | Norm | left: one, two {x, y}",
        "int8: d | Norm | left: one, two {x, y}",
    ]


def test_files_are_written_sorted_and_read(tmp_path: Path) -> None:
    inspections = {
        "b": {"title": "B", "rows": {"float32": rows_of(plan(packed("x")))}, "errors": {"int8": "TypeError"}},
        "a": {"title": "not run, why: x", "rows": {}, "errors": {}},
    }
    blocks = {name: golden.block(name, inspection) for name, inspection in inspections.items()}
    assert blocks["b"].splitlines() == ["b: B", "  int8: raises TypeError", "  x | linear | linear | float32"]
    golden.write("some", blocks, tmp_path)
    assert golden.read("some", tmp_path) == (golden.versions(), blocks)
    assert list(golden.read("some", tmp_path)[1]) == ["a", "b"]
    assert golden.read("absent", tmp_path) == ("", {})


def test_a_difference_is_a_unified_diff() -> None:
    before = "a: A\n  one | x\n  two | y"
    assert golden.difference("a", before, before) == []
    assert golden.difference("a", before, before.replace("y", "z"))[-2:] == ["-  two | y", "+  two | z"]
    assert golden.difference("a", None, "a: A")[-1] == "+a: A"
    assert golden.difference("a", "a: A", None)[-1] == "-a: A"


def test_the_command_compares_and_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"pyg.GCNConv": packed("a"), "pyg.SimpleConv": packed("b"), "bert": packed("c")}

    def inspections(wanted: list[str], *_: object) -> dict[str, Inspection]:
        return {
            name: {"title": "A", "rows": {"float32": rows_of(plan(found[name]))}, "errors": {}}
            for name in wanted
        }

    monkeypatch.setattr(command, "FOLDER", tmp_path)
    monkeypatch.setattr(command, "inspections", inspections)
    assert command.main(["--update", *found]) == 0
    assert {file.name for file in tmp_path.iterdir()} == {"pyg.txt", "transformers.txt"}
    assert command.main(list(found)) == 0
    found["pyg.GCNConv"] = packed("a", "int8")
    assert command.main(["bert", "pyg.SimpleConv"]) == 0
    capsys.readouterr()
    assert command.main(list(found)) == 1
    printed = capsys.readouterr().out
    assert "--- golden/pyg.GCNConv" in printed
    assert "-  a | linear | linear | float32\n+  a | linear | linear | int8" in printed
    assert "1 of 3 models have other rows: pyg.GCNConv" in printed
    assert command.main(["--update", "pyg.GCNConv"]) == 0
    assert command.main(list(found)) == 0
    assert command.main(["pyg.GCNConv2"]) == 2


@pytest.mark.parametrize(
    ("name", "group"),
    [
        *(("bert", "transformers"), ("kosmos-2.5", "transformers"), ("pyg.GCNConv", "pyg")),
        *(("diffusers.flux", "diffusers"), ("timm.cvt_13", "suites")),
    ],
)
def test_a_name_belongs_to_a_golden_file(name: str, group: str) -> None:
    assert group_of(name) == group


def test_every_model_has_a_block() -> None:
    """`make plans-update` adds the models that libraries or tests have added."""
    for group in GROUPS:
        versions, blocks = golden.read(group)
        assert set(blocks) == set(names(group)) or versions != golden.versions(), group


@pytest.fixture(scope="module")
def inspected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Inspection]:
    """What `make plans` finds of `MODELS`, in a process as its own."""
    return command.inspections(list(MODELS), tmp_path_factory.mktemp("plans") / "plans.jsonl", shards=1)


@pytest.mark.parametrize("name", MODELS)
def test_plans_are_those_of_the_golden_file(name: str, inspected: dict[str, Inspection]) -> None:
    versions, blocks = golden.read(group_of(name))
    if versions != golden.versions():
        pytest.skip(f"the golden file is of {versions}")
    assert golden.difference(name, blocks[name], golden.block(name, inspected[name])) == []
