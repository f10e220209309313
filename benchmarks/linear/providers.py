"""Ways to compute one linear layer: ours, and every packed one that torch has."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kernels import OURS, PARTIAL
from hf_cpu_accel.ops.linear import linear
from hf_cpu_accel.packing.linear import pack_linear
from hf_cpu_accel.providers.torch_ops import candidates
from hf_cpu_accel.runtime import hardware

# A provider turns (weight [N, K], bias [N], input [M, K]) into x -> x W^T + b, with what may be done ahead done ahead.
Provider = Callable[[Tensor, Tensor, Tensor], Callable[[Tensor], Tensor]]


def _torch_linear(weight: Tensor, bias: Tensor, x: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.nn.functional.linear(x, weight, bias)


def _mkl_packed(weight: Tensor, bias: Tensor, x: Tensor) -> Callable[[Tensor], Tensor]:
    rows = x.shape[0]
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkl._mkl_linear(x, packed, weight, bias, rows)


def _onednn_packed(weight: Tensor, bias: Tensor, x: Tensor) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, x.shape[0])
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _quantize_dynamic(engine: str) -> Provider:
    def make(weight: Tensor, bias: Tensor, x: Tensor) -> Callable[[Tensor], Tensor]:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
        layer.weight.data, layer.bias.data = weight, bias
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = engine  # packing reads it; the packed layer keeps to it
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it is deprecated, and still what many people run
                model = torch.nn.Sequential(layer)
                return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)
        finally:
            torch.backends.quantized.engine = before

    return make


def _onednn_qlinear(weight: Tensor, bias: Tensor, x: Tensor) -> Callable[[Tensor], Tensor]:
    """The op of Inductor's int8 graphs, on activations that are quantized ahead."""
    low, high = x.aminmax()
    scale = float(high - low) / 255
    zero = int(torch.round(-low / scale))
    quantized = (torch.round(x / scale) + zero).clamp(0, 255).to(torch.uint8)
    scales = weight.abs().amax(1) / 127
    rows = torch.round(weight / scales.unsqueeze(1)).to(torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(rows, list(x.shape))
    zeros = torch.zeros_like(scales, dtype=torch.int64)
    output = (1.0, 0, torch.float32, "none", [], "")
    op = torch.ops.onednn.qlinear_pointwise
    return lambda x: op(quantized, scale, zero, packed, scales, zeros, bias, *output)


def _ours(dtype: str) -> Provider:
    def make(weight: Tensor, bias: Tensor, x: Tensor) -> Callable[[Tensor], Tensor]:
        packed = pack_linear(weight, dtype)
        return lambda x: linear(x, packed, bias)

    return make


# dtype -> (dtype of the input, of weight and bias before packing, and of the output; providers by name)
PROVIDERS: dict[str, tuple[torch.dtype, dict[str, Provider]]] = {
    "float32": (
        torch.float32,
        {
            "F.linear": _torch_linear,
            "MKL packed": _mkl_packed,
            "oneDNN packed": _onednn_packed,
            OURS: _ours("float32"),
        },
    ),
    "bfloat16": (
        torch.bfloat16,
        {"F.linear": _torch_linear, "oneDNN packed": _onednn_packed, OURS: _ours("bfloat16")},
    ),
    "int8": (
        torch.float32,
        {
            "FBGEMM dynamic": _quantize_dynamic("fbgemm"),
            "oneDNN dynamic": _quantize_dynamic("onednn"),
            f"oneDNN qlinear{PARTIAL}": _onednn_qlinear,
            OURS: _ours("int8"),
        },
    ),
}


def usable(dtype: str) -> dict[str, Provider]:
    """The providers of a dtype that this build of torch has, and that compute the layer on this CPU."""
    lacking = ["MKL"] * (not torch.backends.mkl.is_available())
    if hardware.lacks_vnni():
        lacking.append("qlinear")  # multiplies bytes by pairs whose sums saturate
    if dtype == "bfloat16" and not candidates("bfloat16"):
        lacking.append("oneDNN")
    return {name: make for name, make in PROVIDERS[dtype][1].items() if not any(of in name for of in lacking)}
