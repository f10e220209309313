"""ffn and gated_ffn against the linear layers that they are made of, and against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hf_cpu_accel.ops.ffn import ffn, gated_ffn, gated_ffn_reference
from hf_cpu_accel.ops.linear import ACTIVATIONS, linear
from hf_cpu_accel.packing.linear import pack_linear, unpack_linear
from tests.ops.linear_cases import BOUND


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_ffn_is_two_linears(dtype: str, activation: str) -> None:
    x, up, down = (
        torch.randn(2, 19, 48),
        pack_linear(torch.randn(130, 48) / 7, dtype),
        pack_linear(torch.randn(48, 130) / 11, dtype),
    )
    up_bias, down_bias, residual = torch.randn(130), torch.randn(48), torch.randn(2, 19, 48)
    expected = linear(linear(x, up, up_bias, activation=activation), down, down_bias, residual=residual)
    got = ffn(x, up, up_bias, down, down_bias, activation=activation, residual=residual)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    truth = F.linear(
        ACTIVATIONS[activation](F.linear(x.double(), unpack_linear(up).double(), up_bias.double())),
        unpack_linear(down).double(),
        down_bias.double(),
    )
    assert (got - residual - truth).abs().max() <= BOUND[dtype] * truth.abs().max()


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("rows", "gate_last"), [(1, False), (19, True), (700, False), (700, True)])
def test_a_gated_ffn_is_two_linears_and_a_product(dtype: str, rows: int, gate_last: bool) -> None:
    x, residual = torch.randn(48, rows).t(), torch.randn(rows, 50)
    up, down = pack_linear(torch.randn(192, 48) / 7, dtype), pack_linear(torch.randn(50, 96) / 10, dtype)
    up_bias, down_bias = torch.randn(192), torch.randn(50)
    gate, value = linear(x, up, up_bias).chunk(2, dim=-1)[:: -1 if gate_last else 1]
    expected = linear(F.silu(gate) * value, down, down_bias, residual=residual)
    options = {"activation": "silu", "residual": residual, "gate_last": gate_last}
    got = gated_ffn(x, up, up_bias, down, down_bias, **options)
    # One place of rounding on the way is another for the integer kinds: a step of the quantized intermediate.
    step = 1e-3 if dtype.startswith("affine") else 1e-5 if up.scale is None else 0.05
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=step)
    arguments = (
        up.data,
        up.scale,
        up_bias,
        down.data,
        down.scale,
        down_bias,
        residual,
        96,
        50,
        "silu",
        gate_last,
    )
    reference = gated_ffn_reference(x, *arguments)
    assert (got - reference).abs().max() <= 2 * BOUND[dtype] * reference.abs().max()


@pytest.mark.parametrize("dtype", BOUND)
def test_opcheck(dtype: str) -> None:
    up, down = pack_linear(torch.randn(40, 24), dtype), pack_linear(torch.randn(24, 40), dtype)
    x, bias = torch.randn(3, 5, 24), torch.randn(40)
    ops = torch.ops.hf_cpu_accel
    torch.library.opcheck(
        ops.ffn, (x, up.data, up.scale, bias, down.data, down.scale, None, x, 40, 24, "relu")
    )
    gated = pack_linear(torch.randn(64, 24), dtype)
    down = pack_linear(torch.randn(24, 32), dtype)
    torch.library.opcheck(
        ops.gated_ffn, (x, gated.data, gated.scale, None, down.data, down.scale, None, x, 32, 24, "silu")
    )
    torch.library.opcheck(
        ops.gated_ffn,
        (x, gated.data, gated.scale, None, down.data, down.scale, None, x, 32, 24, "silu", True),
    )


def test_bad_arguments_are_named() -> None:
    packed = pack_linear(torch.randn(40, 24), "float32")
    with pytest.raises(ValueError, match="up has 40 output features, down has 20 input features"):
        gated_ffn(
            torch.randn(3, 24),
            packed,
            None,
            pack_linear(torch.randn(24, 20), "float32"),
            None,
            activation="silu",
        )
    with pytest.raises(ValueError, match="down has 30 input features"):
        ffn(
            torch.randn(3, 24),
            packed,
            None,
            pack_linear(torch.randn(24, 30), "float32"),
            None,
            activation="none",
        )
