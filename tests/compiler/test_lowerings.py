"""Pointwise operations behind a product, in the generated code that the library's tiles go through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.compiler import torch_private
from hf_cpu_accel.compiler.backend import hf_cpu_accel
from hf_cpu_accel.ops.linear import linear
from hf_cpu_accel.packing.linear import DTYPES, pack_linear
from tests.compiler.conftest import Calls, only_graph

Run = Callable[..., dict[str, int]]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch, compiled: Callable[..., Any]) -> Run:
    """Compiles a module, compares it on inputs of several sizes, and gives Inductor's counts of templates and of what it put
    behind them."""

    def run(
        module: nn.Module, *batches: tuple[Tensor, ...], atol: float = 2e-5, **options: Any
    ) -> dict[str, int]:
        torch_private.counters("inductor").clear()
        call = compiled(module, **options)
        with torch.no_grad():
            for inputs in batches:
                torch.testing.assert_close(
                    call(*inputs), module(*inputs), atol=atol, rtol=1e-2 if atol > 1e-4 else 1e-4
                )
        only_graph()
        counters = torch_private.counters("inductor")
        return {
            "templates": counters["cpp_templated_kernel_counter"],
            "behind": counters["cpp_epilogue_fusion_counter"],
        }

    return run


@pytest.mark.parametrize(("in_features", "out_features"), [(48, 64), (33, 41)])
def test_a_gate_and_a_residual_go_into_the_tiles(in_features: int, out_features: int, fused: Run) -> None:
    """As in a block of a diffusion transformer: gates per image, behind a linear layer. Rows of more than one tile, and of less."""

    def function(m: Any, x: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
        return residual + gate.unsqueeze(1) * m.linear(x)

    batches = [
        (torch.randn(b, n, in_features), torch.randn(b, out_features), torch.randn(b, n, out_features))
        for b, n in ((3, 7), (2, 65), (4, 2))
    ]
    module = Calls(function, linear=nn.Linear(in_features, out_features))
    assert fused(module, *batches) == {"templates": 1, "behind": 1}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_weight(dtype: str, fused: Run) -> None:
    linear = nn.Linear(64, 96)
    module = Calls(lambda m, x: torch.sin(m.linear(x)) * 2, linear=linear)
    atol = {"float32": 2e-5, "bfloat16": 0.03, "int8": 0.06, "int8-weight": 0.03, "int4": 0.4}[dtype]
    assert fused(module, (torch.randn(5, 64),), (torch.randn(30, 64),), atol=atol, dtype=dtype) == {
        "templates": 1,
        "behind": 1,
    }


def test_weights_in_affine_groups_stay_a_call_of_their_own(fused: Run) -> None:
    packed = pack_linear(torch.randn(96, 64) / 8, "affine4")
    module = Calls(lambda m, x: torch.sin(linear(x, packed)) * 2, linear=nn.Linear(64, 96))
    assert fused(module, (torch.randn(5, 64),), atol=1e-4) == {"templates": 0, "behind": 0}


def test_bfloat16_rows_are_rounded_once(fused: Run) -> None:
    module = Calls(
        lambda m, x: (m.linear(x) * m.scale).float(),
        linear=nn.Linear(64, 96),
        scale=nn.Parameter(torch.randn(96)),
    )
    batch = torch.randn(2, 9, 64).bfloat16()
    assert fused(module.bfloat16(), (batch,), atol=0.03) == {"templates": 1, "behind": 1}


def test_results_that_others_read_are_written_too(fused: Run) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        product = m.linear(x)
        return torch.cat([product.cumsum(1), torch.sin(product)])

    assert fused(Calls(function, linear=nn.Linear(32, 64)), (torch.randn(3, 5, 32),))["templates"] == 1


def test_an_ffn_whose_residual_is_its_input(fused: Run) -> None:
    module = Calls(
        lambda m, x: (x + m.down(F.gelu(m.up(x)))) * m.scale,
        up=nn.Linear(64, 128),
        down=nn.Linear(128, 64),
        scale=nn.Parameter(torch.randn(64)),
    )
    assert fused(module, (torch.randn(2, 5, 64),), (torch.randn(3, 40, 64),)) == {"templates": 1, "behind": 1}


def test_a_gated_ffn_on_a_part_of_the_rows(fused: Run) -> None:
    """Its input begins in the middle of another tensor's memory."""

    def function(m: Any, x: Tensor) -> Tensor:
        rows = torch.sin(x)[3:]
        return m.down(F.silu(m.gate(rows)) * m.up(rows)) * 0.3

    gate, up, down = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False), nn.Linear(64, 32)
    module = Calls(function, gate=gate, up=up, down=down)
    assert fused(module, (torch.randn(9, 32),), (torch.randn(50, 32),)) == {"templates": 1, "behind": 1}


def test_a_product_with_nothing_behind_it_is_a_call(fused: Run) -> None:
    assert fused(Calls(lambda m, x: m.linear(x), linear=nn.Linear(32, 64)), (torch.randn(5, 32),)) == {
        "templates": 0,
        "behind": 0,
    }


def test_several_threads_share_the_tiles(fused: Run) -> None:
    torch.set_num_threads(2)
    module = Calls(lambda m, x: m.linear(x).sin() + x[:, :1], linear=nn.Linear(256, 512))
    assert fused(module, (torch.randn(300, 256),), (torch.randn(3, 256),), atol=1e-4)["templates"] == 1


def test_inductor_alone_calls_the_ops_as_before() -> None:
    """Our lowerings, once registered, leave other backends' graphs of accelerated models to themselves."""
    module = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64), nn.Sigmoid()).eval()
    batch = torch.randn(4, 64)
    with torch.no_grad():
        torch.compile(module, backend=hf_cpu_accel)(batch)
        expected = module(batch)
        accelerate_for_cpu(module, dtype="float32")
        torch_private.counters("inductor").clear()
        torch._dynamo.reset()
        torch.testing.assert_close(
            torch.compile(module, backend="inductor")(batch), expected, atol=2e-5, rtol=1e-4
        )
    assert torch_private.counters("inductor")["cpp_templated_kernel_counter"] == 0
