"""No op gives gradients that are None or tangents that are zero: an error, or the derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad

import hf_cpu_accel.api  # all ops  # noqa: F401
from hf_cpu_accel.ops.attention import attention
from hf_cpu_accel.ops.derivatives import (
    TransformError,
    has_tangent,
    in_forward_mode,
    in_transform,
    refuse_derivatives,
    wants_derivative,
)
from hf_cpu_accel.ops.ffn import ffn, gated_ffn
from hf_cpu_accel.ops.group_norm import group_norm
from hf_cpu_accel.ops.linear import linear, linear_split
from hf_cpu_accel.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from hf_cpu_accel.ops.registry import NAMESPACE
from hf_cpu_accel.ops.rope import rotary_embedding
from hf_cpu_accel.ops.snake import snake
from hf_cpu_accel.packing.linear import pack_linear

OPS = torch.ops.hf_cpu_accel
REMEDY = "has no derivative.*hf_cpu_accel.restore"


def norm(x: Tensor) -> Tensor:
    output: Tensor = OPS.rms_norm(x, None, 1e-6)
    return output


X, V = torch.randn(3, 8), torch.randn(3, 8)
TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "grad": lambda f: func.grad(lambda x: f(x).sum())(X),
    "vjp": lambda f: func.vjp(f, X)[1](V),
    "jvp": lambda f: func.jvp(f, (X,), (V,)),
    "jacrev": lambda f: func.jacrev(f)(X),
    "jacfwd": lambda f: func.jacfwd(f)(X),
    "hessian": lambda f: func.hessian(lambda x: f(x).sum())(X),
    "vmap of grad": lambda f: func.vmap(func.grad(lambda x: f(x).sum()))(X),
    "grad of vmap": lambda f: func.grad(lambda x: func.vmap(f)(x).sum())(X),
    "jvp of vmap": lambda f: func.jvp(func.vmap(f), (X,), (V,)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_that_differentiate_an_op_are_refused(transform: str) -> None:
    with pytest.raises(RuntimeError, match=f"rms_norm under torch.func {REMEDY}"):
        TRANSFORMS[transform](norm)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_an_op_of_constants_runs_under_transforms(transform: str) -> None:
    constant = norm(X)[0]
    expected = TRANSFORMS[transform](lambda x: x.sin() * constant)
    found = TRANSFORMS[transform](lambda x: x.sin() * norm(X)[0])
    torch.testing.assert_close(found, expected)


def test_an_op_runs_under_vmap_alone() -> None:
    torch.testing.assert_close(func.vmap(norm)(X), norm(X))


def test_forward_mode_is_seen_where_a_tensor_has_a_tangent() -> None:
    assert not in_forward_mode()
    with forward_ad.dual_level():
        assert in_forward_mode()
        dual = forward_ad.make_dual(X, V)
        assert has_tangent(None, dual)
        assert not has_tangent(X, None)
        assert wants_derivative(X, dual)
        with torch.no_grad(), pytest.raises(RuntimeError, match=f"it {REMEDY}"):
            refuse_derivatives("it", dual)
    assert not in_forward_mode()


def test_reverse_mode_counts_where_it_is_recorded() -> None:
    leaf = X.clone().requires_grad_()
    assert wants_derivative(None, leaf)
    assert not wants_derivative(X, None)
    with torch.no_grad():
        assert not wants_derivative(leaf)
        refuse_derivatives("it", leaf)


def _has_tensors(values: Any) -> bool:
    return any("Tensor" in str(value.type) for value in values)


def _schema(name: str) -> Any:
    return getattr(OPS, name.partition("::")[2]).default._schema


# Without those that keep tensors in the library and give a number.
DIFFERENTIABLE = [
    name
    for name in sorted(torch._C._dispatch_get_all_op_names())
    if name.startswith(f"{NAMESPACE}::")
    and _has_tensors(_schema(name).arguments)
    and (_has_tensors(_schema(name).returns) or not _schema(name).returns)
]


def _arguments(name: str, x: Tensor) -> list[Any]:
    """`x` for the first tensor of an op, and values that nothing reads for all else."""
    fillers = {"int": 1, "SymInt": 1, "float": 1.0, "bool": False, "str": ""}
    values: list[Any] = []
    for argument in _schema(name).arguments:
        kind = str(argument.type)
        if kind.startswith("Optional"):
            values.append(None)
        elif kind.startswith("List"):
            values.append([x] if "Tensor" in kind else [])
        else:
            values.append(x if kind == "Tensor" else fillers[kind])
    return values


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap of grad", "jacfwd"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_every_op_is_refused_where_a_transform_differentiates_it(name: str, transform: str) -> None:
    op = getattr(OPS, name.partition("::")[2])
    with pytest.raises(RuntimeError, match=f"the op {name} under torch.func {REMEDY}"):
        TRANSFORMS[transform](lambda x: op(*_arguments(name, x)))


WEIGHT, WIDE, NARROW = (pack_linear(torch.randn(shape), "float32") for shape in ((8, 8), (64, 8), (8, 32)))
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "linear": lambda x: linear(x, WEIGHT),
    "linear, bias": lambda x: linear(X, WEIGHT, x[0]),
    "linear_split": lambda x: linear_split(x, WEIGHT, None, [8]),
    "ffn": lambda x: ffn(x, WEIGHT, None, WEIGHT, None, activation="gelu"),
    "gated_ffn": lambda x: gated_ffn(x, WIDE, None, NARROW, None, activation="silu"),
    "attention": lambda x: attention(x[None, None], X[None, None], X[None, None]),
    "attention, mask": lambda x: attention(X[None, None], X[None, None], X[None, None], mask=x[:, :3]),
    "layer_norm": lambda x: layer_norm(x, None, None, 1e-5),
    "layer_norm, weight": lambda x: layer_norm(X, x[0], None, 1e-5),
    "rms_norm": lambda x: rms_norm(x, None, 1e-5),
    "add_layer_norm": lambda x: add_layer_norm(X, x, None, None, 1e-5),
    "add_rms_norm": lambda x: add_rms_norm(X, x, None, 1e-5),
    "group_norm": lambda x: group_norm(x, 2, None, None, 1e-5, activation="none"),
    "rotary_embedding": lambda x: rotary_embedding(x[None, :, None], X[None], X[None]),
    "snake": lambda x: snake(x[None], X[0, :3], X[1, :3]),
}


def dual(function: Callable[[Tensor], Any]) -> None:
    with forward_ad.dual_level():
        function(forward_ad.make_dual(X, V))


def quiet_dual(function: Callable[[Tensor], Any]) -> None:
    with torch.no_grad():
        dual(function)


DERIVATIVES: dict[str, Callable[[Callable[[Tensor], Any]], Any]] = {
    "reverse": lambda f: f(X.clone().requires_grad_()),
    "dual": dual,
    "dual under no_grad": quiet_dual,
    "func.grad": lambda f: func.grad(f)(X),
    "func.jvp": lambda f: func.jvp(f, (X,), (V,)),
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_refuse_derivatives(name: str, derivative: str) -> None:
    FUNCTIONS[name](X)  # it takes such arguments
    with pytest.raises(RuntimeError, match=f"{name.partition(',')[0]} {REMEDY}"):
        DERIVATIVES[derivative](FUNCTIONS[name])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_take_leaves_where_nothing_is_recorded(name: str) -> None:
    leaf = X.clone().requires_grad_()
    with torch.no_grad():
        torch.testing.assert_close(FUNCTIONS[name](leaf), FUNCTIONS[name](X))


def test_an_op_without_a_fallback_under_vmap_names_the_remedy() -> None:
    with pytest.raises(
        TransformError, match=r"linear_split does not run under this transform.*hf_cpu_accel.restore"
    ):
        func.vmap(lambda x: linear_split(x, WEIGHT, None, [8]))(X)


def test_a_transform_is_seen() -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(in_transform())
        return x.sum()

    func.grad(look)(X)
    func.vmap(look)(X)
    func.jvp(look, (X,), (V,))
    look(X)
    assert seen == [True, True, True, False]
