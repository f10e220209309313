"""Linears of the stand-ins for hosts, by the form of their weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel.checkpoints.stored_weight import plain_tensors
from tests.checkpoints.stand_ins import (
    HQQLinear,
    Int4OpaqueTensor,
    Int4Tensor,
    Int8Tensor,
    IntxUnpackedToInt8Tensor,
    Linear4bit,
    Linear8bitLt,
    QLinear,
    QTensor,
    Wrapper,
    dequantize_4bit,
)

HOSTS = {
    "bitsandbytes.nn.modules": (Linear4bit, Linear8bitLt),
    "bitsandbytes.functional": (dequantize_4bit,),
    "hqq.core.quantize": (HQQLinear,),
    "optimum.quanto.nn.qlinear": (QLinear,),
    "torchao.quantization": (Int8Tensor, IntxUnpackedToInt8Tensor, Int4Tensor),
    "torchao.prototype.quantization.int4.int4_opaque_tensor": (Int4OpaqueTensor,),
}


def be_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the classes here be those of the hosts."""
    for name, classes in HOSTS.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**{cls.__name__: cls for cls in classes}))  # type: ignore[arg-type]


def torchao(weight: Any, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return linear


def quanto(weight: Any, bias: Tensor | None) -> QLinear:
    return QLinear(weight.true, nn.Parameter(weight, requires_grad=False), bias)


Make = Callable[[int, int, Tensor | None], nn.Module]
EXACT: dict[str, tuple[Make, str]] = {
    "bitsandbytes int8": (Linear8bitLt.random, "affine8"),
    **{
        f"HQQ {bits} bits": (lambda n, k, b, bits=bits: HQQLinear.random(n, k, b, bits, 64), form)  # type: ignore[misc]
        for bits, form in ((8, "affine8"), (4, "affine4"), (3, "affine4"), (2, "affine4"), (1, "affine4"))
    },
    "HQQ 4 bits, whole rows": (lambda n, k, b: HQQLinear.random(n, k, b, 4, None), "affine4"),
    "quanto qint8": (lambda n, k, b: quanto(QTensor.bytes(n, k), b), "affine8"),
    "quanto qint4": (lambda n, k, b: quanto(QTensor.groups(n, k, 4, 96), b), "affine4"),
    "quanto qint2": (lambda n, k, b: quanto(QTensor.groups(n, k, 2, 32, whole_shift=True), b), "affine4"),
    "torchao Int8": (lambda n, k, b: torchao(Int8Tensor.random(n, k), b), "affine8"),
    "torchao Int8 blocks": (lambda n, k, b: torchao(Int8Tensor.random(n, k, rows_of_block=n), b), "affine8"),
    "torchao Intx 4": (lambda n, k, b: torchao(IntxUnpackedToInt8Tensor.random(n, k, 4, 32), b), "affine4"),
    "torchao Intx 6": (lambda n, k, b: torchao(IntxUnpackedToInt8Tensor.random(n, k, 6, 96), b), "affine8"),
    "torchao Int4": (lambda n, k, b: torchao(Int4Tensor.random(n, k, 32), b), "affine4"),
    "torchao Int4Opaque": (lambda n, k, b: torchao(Int4OpaqueTensor.random(n, k, 32), b), "affine4"),
}
"""(out_features, in_features, bias) -> a linear, and the form in which it is packed. 192 input features do for all."""
ROUNDED: dict[str, Make] = {
    "bitsandbytes NF4": lambda n, k, b: Linear4bit.random(n, k, b, "nf4", nested=False),
    "bitsandbytes NF4, nested": lambda n, k, b: Linear4bit.random(n, k, b, "nf4", nested=True),
    "bitsandbytes FP4": lambda n, k, b: Linear4bit.random(n, k, b, "fp4", nested=False),
}
AS_ASKED: dict[str, Make] = {
    "HQQ 4 bits, axis 0": lambda n, k, b: HQQLinear.random(n, k, b, 4, 64, axis=0),
    "quanto qfloat8": lambda n, k, b: quanto(QTensor.bytes(n, k, torch.float8_e4m3fn), b),
}


def true_weight(linear: nn.Module) -> Tensor:
    """What its host multiplies by, float32 [out_features, in_features]."""
    found: Any = linear.weight.true if isinstance(getattr(linear, "weight", None), Wrapper) else linear.true
    return found.float()


COLUMNS = 192
SIZES = {"q": 64, "k": 32, "v": 96, "o": 48}


class Projections(nn.Module):
    def __init__(self, make: Make, columns: int = COLUMNS, *, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(columns)
        for name, size in SIZES.items():
            self.add_module(name, make(size, columns, torch.randn(size) if bias and name != "k" else None))
        self.eval()

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.norm(x)
        return [self.get_submodule(name)(x) for name in SIZES]


def outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return model(x)


def held(model: nn.Module) -> dict[str, Tensor]:
    """All numbers of its linears, by where they are."""
    found = {}
    for path, module in model.named_modules():
        for place in (module._parameters, vars(module)):
            for name, value in place.items():
                if isinstance(value, Tensor):
                    for number, tensor in enumerate(plain_tensors(value)):
                        found[f"{path}.{name}.{number}"] = tensor
    return found
