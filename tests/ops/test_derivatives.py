"""No op gives gradients that are None or tangents that are zero: an error, or the derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad

import hf_cpu_accel.api  # all ops  # noqa: F401
from hf_cpu_accel.ops.derivatives import has_tangent, in_forward_mode, refuse_derivatives, wants_derivative

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
