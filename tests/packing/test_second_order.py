"""Rounding for the inputs that weights meet, against the same done step by step in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_cpu_accel.ops.linear import linear
from hf_cpu_accel.packing import affine, int4
from hf_cpu_accel.packing.linear import pack_linear, unpack_linear
from hf_cpu_accel.packing.rotation import rotate, rotate_back
from hf_cpu_accel.packing.second_order import DAMPING, Curvature, InputMoments, pack_rounded


def inputs(features: int, rows: int = 400, seed: int = 0) -> Tensor:
    """Some directions are much larger than others, as in transformers."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(features, features, generator=torch.Generator().manual_seed(9)) / features**0.5
    sizes = torch.logspace(0, -2, features)
    return torch.randn(rows, features, generator=generator) * sizes @ mixing


def moments(rows: Tensor, damping: float = DAMPING) -> InputMoments:
    return InputMoments(rows.T @ rows / len(rows), damping)


def by_hand(weight: Tensor, gram: Tensor, form: str, group: int) -> Tensor:
    """Each feature is rounded, and what follows moves by the inverse of the moments that are left: no factor, no blocks."""
    left, gram = weight.double().clone(), gram.double()
    gram = gram + DAMPING * gram.diagonal().mean() * torch.eye(len(gram))
    inverses = [torch.linalg.inv(gram[k:, k:]) for k in range(len(gram))]
    rounded = torch.empty_like(left)
    scale = int4.row_scales(weight)[:, None]
    for k, inverse in enumerate(inverses):
        if k % group == 0:
            here = left[:, k : k + group].float()
            importance = torch.tensor([1 / some[0, 0] for some in inverses[k : k + group]])
            if form == "int4":
                multiplier = int4.best_multipliers(here / scale, importance)
            else:
                step, offset = affine.best_range(here, 4, importance)
        values = left[:, k : k + 1].float()
        if form == "int4":
            nearest = int4.levels_of(int4.nearest(values / (multiplier * scale))) * multiplier * scale
        else:
            nearest = affine.nearest(values, step, offset, 4) * step + offset
        rounded[:, k : k + 1] = nearest
        error = (left[:, k] - rounded[:, k]) / inverse[0, 0]
        left[:, k:] -= error[:, None] * inverse[0]
    return rounded.float()


@pytest.mark.parametrize("form", ["int4", "affine4"])
@pytest.mark.parametrize(("rows", "columns", "group"), [(32, 128, 32), (40, 200, 64)])
def test_it_is_what_the_method_says(form: str, rows: int, columns: int, group: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    some = moments(inputs(columns))
    given = unpack_linear(pack_rounded(weight, some, form, group, sweeps=0))
    if form == "int4":
        expected = rotate(by_hand(rotate_back(weight), rotate(rotate(some.gram).T), form, group))
    else:
        expected = by_hand(weight, some.gram, form, group)
    # A value between two steps may go to either, and what follows goes with it.
    per_row = (given - expected).norm(dim=1) / weight.norm(dim=1)
    assert (per_row < 1e-4).float().mean() > 0.8
    assert abs(some.error(weight, given) / some.error(weight, expected) - 1) < 0.02


@pytest.mark.parametrize("form", ["int4", "affine4"])
@pytest.mark.parametrize(("rows", "columns", "group"), [(64, 96, 32), (33, 130, 64), (1, 256, 128)])
def test_outputs_for_other_inputs_of_that_kind_are_nearer(
    form: str, rows: int, columns: int, group: int
) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    packed = pack_rounded(weight, moments(inputs(columns)), form, group)
    plain = pack_linear(weight, form, int4_group=group)
    assert (packed.dtype, packed.data.shape) == (plain.dtype, plain.data.shape)
    held_out = inputs(columns, seed=5)
    expected = held_out @ weight.T
    errors = [(linear(held_out, some) - expected).norm() / expected.norm() for some in (packed, plain)]
    assert errors[0] < 0.8 * errors[1]


@pytest.mark.parametrize("form", ["int4", "affine4"])
def test_without_a_preferred_direction_it_is_the_nearest_weight(form: str) -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    plain = (unpack_linear(pack_linear(weight, form)) - weight).norm()
    for gram in (torch.eye(128), torch.zeros(128, 128)):  # of noise; of nothing
        given = unpack_linear(pack_rounded(weight, InputMoments(gram), form, 32))
        assert abs((given - weight).norm() / plain - 1) < 1e-3


@pytest.mark.parametrize("form", ["int4", "affine4"])
def test_each_sweep_takes_something_off_the_error(form: str) -> None:
    weight = torch.randn(64, 130, generator=torch.Generator().manual_seed(1))
    some = moments(inputs(130))
    errors = [
        some.error(weight, unpack_linear(pack_rounded(weight, some, form, 32, sweeps=sweeps)))
        for sweeps in range(3)
    ]
    assert errors[2] < errors[1] < 0.995 * errors[0]


def test_a_weight_of_zeros_stays() -> None:
    packed = pack_rounded(torch.zeros(5, 40), moments(inputs(40)), "int4", 32)
    assert not unpack_linear(packed).any()


def test_the_sums_are_those_of_the_integers() -> None:
    packed = pack_rounded(torch.randn(40, 128), moments(inputs(128)), "int4", 32)
    assert packed.scale is not None
    assert torch.equal(packed.scale[1], int4.unpack(packed.data)[:40].float().sum(dim=1))


def test_inputs_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="NaN, infinity"):
        Curvature.of(torch.full((4, 4), torch.nan), DAMPING)
