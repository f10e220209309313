"""What a call is, what a forward reads, which parts of a model are compiled, and when a form is good enough."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from hf_cpu_accel import accelerate_for_cpu, explain
from hf_cpu_accel.compiler.background import sources, toolchain, verdict
from hf_cpu_accel.compiler.background.calls import NotPlain, flatten, rebuilt
from hf_cpu_accel.compiler.background.find import find_regions
from hf_cpu_accel.compiler.background.reads import digest, is_settings, recorded, structure
from hf_cpu_accel.compiler.background.verdict import Verdict, disagreement
from tests.compiler.background.conftest import blocks


def key(*args: Any, **kwargs: Any) -> Any:
    return flatten(args, kwargs)[0]


def test_keys_tell_all_but_sizes() -> None:
    x = torch.randn(3, 4)
    assert key(x, mask=None) == key(torch.randn(5, 2), mask=None)
    different = [
        key(x),
        key(x, mask=False),
        key(x, mask=0),
        key(x, mask=x),
        key((x,), mask=None),
        key([x], mask=None),
        key(x.bfloat16(), mask=None),
        key(x[:1], mask=None),
        key(x[None], mask=None),
    ]
    assert len({key(x, mask=None), *different}) == len(different) + 1


@pytest.mark.parametrize(
    ("value", "reason"), [(object(), "a object"), (torch.empty(0, 3), "an empty tensor"), ({1}, "a set")]
)
def test_what_is_not_plain(value: object, reason: str) -> None:
    with pytest.raises(NotPlain, match=f"^{reason}$"):
        flatten((torch.ones(2), {"cache": value}), {})


def test_rebuilt_puts_tensors_in_their_places() -> None:
    args = (torch.zeros(1), [None, {"a": torch.ones(2)}], 3)
    tensors = flatten(args, {})[1]
    again = rebuilt(args, [tensor + 1 for tensor in tensors])
    assert torch.equal(again[0], torch.ones(1))
    assert torch.equal(again[1][1]["a"], torch.full((2,), 2.0))
    assert (again[1][0], again[2]) == (None, 3)


class Reader(nn.Module):
    def __init__(self, index: int, slope: float = 2.0) -> None:
        super().__init__()
        self.index, self.config = index, SimpleNamespace(slope=slope)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.config.slope


def test_only_what_is_read_counts() -> None:
    root = nn.Sequential(Reader(3))
    with recorded(root) as found:
        root[0].forward(torch.ones(1))
    assert type(root[0]) is Reader
    assert set(found) == {("0", "config")}
    assert structure(root) == structure(nn.Sequential(Reader(4)))
    assert structure(root) != structure(nn.Sequential(nn.Identity()))


def test_digests() -> None:
    assert digest(SimpleNamespace(a=1, b=[2.0])) == digest(SimpleNamespace(b=[2.0], a=1))
    values = [1, 1.0, True, "1", None, (1,), [1], {1: 2}, torch.ones(2), torch.ones(2, 1), len, digest, int]
    values += [functools.partial(max, 1), functools.partial(max, 2), lambda x: x + 1, lambda x: x + 2]
    assert len({digest(value) for value in values}) == len(values)
    assert digest(torch.ones(2)) == digest(torch.zeros(2))


def test_settings_hold_constants_alone() -> None:
    assert is_settings(BertConfig())
    assert not is_settings(nn.Linear(1, 1))
    assert not is_settings(SimpleNamespace(a=torch.ones(1)))
    assert not is_settings(digest)


def test_sources_are_those_that_ran() -> None:
    with sources.executed() as files:
        blocks()
    stamps = sources.stamps(files)
    assert any(name.endswith("conftest.py") for name in stamps)
    assert not any("/torch/" in name or "/functools.py" in name for name in stamps)
    assert sources.unchanged(stamps)
    assert not sources.unchanged(stamps | {"/no/such/file": "0"})


def test_repeated_blocks_are_found() -> None:
    found = find_regions(blocks(4))
    assert {name: len(modules) for name, modules in found.regions.items()} == {"*": 4}
    two = nn.ModuleDict({"a": blocks(2), "b": blocks(3)})
    assert {name: len(m) for name, m in find_regions(two).regions.items()} == {"a.*": 2, "b.*": 3}


def test_models_without_repetition_are_compiled_whole() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())
    assert find_regions(model).regions == {"the model": [model]}
    many = nn.Sequential(*(blocks(2) for _ in range(5)))
    for index, stage in enumerate(many):
        for block in stage:
            block.append(nn.Linear(32, 8 + index))
    assert list(find_regions(many).regions) == ["the model"]


def test_weights_that_compilers_cannot_read_are_not_compiled() -> None:
    """Those of convolutions in oneDNN's layout; blocks beside them are."""

    def stage() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1))

    model = accelerate_for_cpu(nn.ModuleDict({"images": nn.Sequential(stage(), stage())}).eval())
    assert find_regions(model).regions == {}
    assert "oneDNN's own layout" in str(find_regions(model).reason)
    model["text"] = blocks(2)
    assert list(find_regions(model).regions) == ["text.*"]


def test_layers_that_are_one_op_are_not_compiled() -> None:
    config = BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, vocab_size=32
    )
    model = accelerate_for_cpu(BertModel(config).eval(), compile="background")
    with torch.no_grad():
        model(input_ids=torch.ones(2, 3, dtype=torch.long))
    state = explain(model).compile_state
    assert (
        state
        == "background: nothing, its 2 layers already run as one op each, and little else is left to compile"
    )


def test_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "GAIN", 1.03)
    slower, faster = Verdict(), Verdict()
    for _ in range(verdict.PAIRS - 1):
        slower.add(1.0, 1.0)
        faster.add(1.5, 1.0)
    assert (slower.faster, faster.faster) == (None, None)
    slower.add(9.0, 1.0)
    faster.add(0.1, 1.0)
    assert (slower.faster, slower.gain) == (False, 1.0)
    assert (faster.faster, faster.gain) == (True, 1.5)


@pytest.mark.parametrize(
    ("output", "difference"),
    [
        (torch.ones(2, 3), None),
        (torch.full((2, 3), 1.00001), None),
        (torch.full((2, 3), 1.01), "cosine 1.00000, error 1.0e-02"),
        (torch.ones(2, 3).bfloat16(), "torch.bfloat16 [2, 3] instead of torch.float32 [2, 3]"),
        (torch.full((2, 3), float("nan")), "cosine -1.00000, error inf"),
        (None, "a NoneType instead of a Tensor"),
    ],
)
def test_disagreement(output: Any, difference: str | None) -> None:
    assert disagreement((output, 1), (torch.ones(2, 3), 1), "float32") == difference


def test_compiler_is_looked_for_in_the_path() -> None:
    assert toolchain.compiler({"PATH": "/nowhere"}) is None
    assert toolchain.compiler() is not None
