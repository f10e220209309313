"""Long attention in float32 becomes attention in bfloat16 where the linears around it round as much, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.compiler import report
from hf_cpu_accel.providers.attention import LONG
from hf_cpu_accel.runtime import hardware
from tests.compiler.conftest import only_graph


class Attention(nn.Module):
    """What Flux does between its projections keeps them apart from attention: no rule knows the layer."""

    def __init__(self, mask: Tensor | None = None) -> None:
        super().__init__()
        self.inputs, self.output = nn.Linear(64, 192), nn.Linear(64, 64)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.inputs(x).sin().chunk(3, dim=-1)
        )
        output = F.scaled_dot_product_attention(query, key, value, self.mask)
        return self.output(output.transpose(1, 2).flatten(2).cos())


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.fixture(autouse=True)
def _native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "native_bf16_is_fast", lambda: True)


@pytest.mark.usefixtures("no_codegen")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_long_attention_is_narrow(dtype: str, masked: bool, compiled: Any) -> None:
    check_narrow(dtype, masked, compiled)


def test_long_attention_is_narrow_between_generated_kernels(compiled: Any) -> None:
    check_narrow("bfloat16", True, compiled)


def check_narrow(dtype: str, masked: bool, compiled: Any) -> None:
    torch.manual_seed(0)
    mask = torch.randn(1, 1, LONG, LONG) if masked else None
    module, x = Attention(mask).eval(), torch.randn(2, LONG, 64)
    with torch.no_grad():
        expected = module(x)
        got = compiled(module, dtype=dtype)(x)
        apart = compiled(module, dtype=dtype, skip_passes=("narrow_attention",))(x)
    assert [graph.rewrites.get("narrow_attention") for graph in report.graphs()] == [1, None]
    assert got.dtype is torch.float32
    assert not torch.equal(got, apart)
    assert error(got, apart) <= 1e-2
    assert error(got, expected) <= 2e-2


@pytest.mark.usefixtures("no_codegen")
@pytest.mark.parametrize(
    ("length", "options"), [(LONG - 1, {"dtype": "bfloat16"}), (LONG, {"dtype": "float32"}), (LONG, {})]
)
def test_others_stay_as_they_are(length: int, options: dict[str, str], compiled: Any) -> None:
    module, x = Attention(), torch.randn(1, length, 64)
    with torch.no_grad():
        compiled(module, **options)(x)
    assert only_graph().rewrites["attention"] == 1
    assert only_graph().rewrites["narrow_attention"] == 0


@pytest.mark.usefixtures("no_codegen")
def test_attention_without_linears_stays(compiled: Any) -> None:
    module = Attention()
    module.inputs, module.output = nn.Identity(), nn.Identity()
    compiled(module, dtype="bfloat16")(torch.randn(1, LONG, 192))
    assert only_graph().rewrites["narrow_attention"] == 0


@pytest.mark.usefixtures("no_codegen")
def test_where_bfloat16_is_slow_nothing_is_narrowed(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "native_bf16_is_fast", lambda: False)
    with torch.no_grad():
        compiled(Attention(), dtype="bfloat16")(torch.randn(1, LONG, 64))
    assert only_graph().rewrites["narrow_attention"] == 0


@pytest.mark.usefixtures("no_codegen")
def test_packed_weights_say_how_much_they_round(compiled: Any) -> None:
    for dtype, narrowed in (("bfloat16", 1), ("float32", 0)):
        torch._dynamo.reset()
        model = nn.Sequential(Attention()).eval()
        accelerate_for_cpu(model, dtype=dtype)
        with torch.no_grad():
            compiled(model)(torch.randn(1, LONG, 64))
        assert report.graphs()[-1].rewrites["narrow_attention"] == narrowed


@pytest.mark.usefixtures("no_codegen")
def test_who_widens_queries_of_a_model_in_bfloat16_means_it(compiled: Any) -> None:
    class Widened(Attention):
        def forward(self, x: Tensor) -> Tensor:
            heads = (
                part.float().unflatten(-1, (4, 16)).transpose(1, 2)
                for part in self.inputs(x).chunk(3, dim=-1)
            )
            output = F.scaled_dot_product_attention(*heads)
            return self.output(output.transpose(1, 2).flatten(2).to(x.dtype).cos())

    with torch.no_grad():
        compiled(Widened().bfloat16())(torch.randn(1, LONG, 64, dtype=torch.bfloat16))
    assert only_graph().rewrites["attention"] == 1
    assert only_graph().rewrites["narrow_attention"] == 0
