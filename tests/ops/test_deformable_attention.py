"""deformable_attention against float64, over images, points, dtypes, layouts and thread counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_cpu_accel.ops.deformable_attention import deformable_attention, deformable_attention_reference

DTYPES = [torch.float32, torch.bfloat16]
BOUND = 2e-5  # of float32: where a point lies is rounded by 1e-7 of the image's side
Arguments = tuple[Tensor, list[tuple[int, int]], list[int], Tensor, Tensor]


def inputs(
    batch: int,
    queries: int,
    heads: int,
    features: int,
    shapes: list[tuple[int, int]],
    counts: list[int],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Arguments:
    """Points inside and outside, some of them on borders and corners."""
    g = torch.Generator().manual_seed(seed)
    pixels = sum(height * width for height, width in shapes)
    value = torch.randn(batch, pixels, heads, features, generator=g).to(dtype)
    points = torch.rand(batch, queries, heads, sum(counts), 2, generator=g) * 1.6 - 0.3
    points = torch.where(torch.rand(points.shape, generator=g) < 0.1, points.round(), points)
    weights = torch.rand(batch, queries, heads, sum(counts), generator=g)
    return value, shapes, counts, points, weights


def truth(arguments: Arguments) -> Tensor:
    value, shapes, counts, points, weights = arguments
    sizes = [side for shape in shapes for side in shape]
    return deformable_attention_reference(value.double(), sizes, counts, points.double(), weights.double())


def check(arguments: Arguments) -> None:
    got, value = deformable_attention(*arguments), arguments[0]
    expected = truth(arguments)
    assert got.shape == expected.shape
    assert got.dtype == value.dtype
    assert got.is_contiguous()
    rounding = 2.0**-8 if value.dtype == torch.bfloat16 else 0.0
    scale = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(got.double(), expected, atol=(BOUND + rounding) * max(scale, 1.0), rtol=0.0)


IMAGES = {
    "four": ([(20, 13), (10, 7), (5, 4), (1, 1)], [4, 4, 4, 4]),
    "uneven": ([(3, 9), (2, 2)], [1, 6]),
    "one row": ([(1, 30)], [5]),
    "without points": ([(4, 4), (3, 3)], [0, 2]),
}


def check_deformable_attention(seed: int = 0) -> None:
    """All of it in one call, for the test that repeats it on every instruction-set tier."""
    for shapes, counts in IMAGES.values():
        for dtype in DTYPES:
            for features in (1, 7, 32, 40):
                check(inputs(2, 9, 3, features, shapes, counts, dtype, seed))


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", [1, 8, 32, 40, 100])
def test_images(name: str, dtype: torch.dtype, features: int) -> None:
    check(inputs(2, 9, 3, features, *IMAGES[name], dtype))


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(0, 3),
    queries=st.integers(0, 20),
    heads=st.integers(1, 5),
    features=st.integers(1, 70),
    levels=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=4
    ),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_random_shapes(
    batch: int,
    queries: int,
    heads: int,
    features: int,
    levels: list[tuple[int, int, int]],
    dtype: torch.dtype,
    seed: int,
) -> None:
    shapes, counts = [level[:2] for level in levels], [level[2] for level in levels]
    check(inputs(batch, queries, heads, features, shapes, counts, dtype, seed))


def test_far_away_points_are_nothing() -> None:
    """They are where an integer would overflow, too."""
    value, shapes, counts, points, weights = inputs(1, 4, 2, 8, [(3, 3)], [2])
    points[:, 0], points[:, 1], points[:, 2], points[:, 3] = 1e30, -float("inf"), float("nan"), 0.5
    got = deformable_attention(value, shapes, counts, points, weights)
    assert (got[:, :3] == 0).all()
    assert (got[:, 3:] != 0).any()


def test_layouts_change_nothing() -> None:
    """A part of a wider projection, and heads before pixels."""
    value, *others = inputs(2, 5, 4, 24, [(4, 6), (2, 3)], [3, 2])
    expected = deformable_attention(value, *others)
    wide = torch.cat((value, value), dim=-1)[..., :24]
    turned = value.transpose(1, 2).contiguous().transpose(1, 2)
    for other in (wide, turned):
        assert torch.equal(deformable_attention(other, *others), expected)


def test_threads_change_nothing() -> None:
    arguments = inputs(2, 300, 8, 32, [(16, 16), (8, 8)], [4, 4])
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(deformable_attention(*arguments))
    assert torch.equal(*results)


def test_opcheck() -> None:
    value, _, counts, points, weights = inputs(2, 5, 2, 8, [(4, 6), (2, 3)], [3, 2])
    arguments = (value, [4, 6, 2, 3], counts, points, weights)
    torch.library.opcheck(torch.ops.hf_cpu_accel.deformable_attention.default, arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(1, 30, 2)}, r"value of shape \(1, 30, 2\)"),
        ({4: torch.zeros(1, 5, 2, 4)}, r"weights of shape \(1, 5, 2, 4\)"),
        ({3: torch.zeros(1, 5, 2, 5, 3)}, r"must be \(1, 5, 2, 5\) and \(1, 5, 2, 5, 2\)"),
        ({1: [(4, 6), (2, 4)]}, "with 30 pixels in total"),
        ({1: [(5, 6)]}, "must be 2 pairs"),
    ],
)
def test_bad_shapes_say_so(change: dict[int, object], message: str) -> None:
    arguments = dict(enumerate(inputs(1, 5, 2, 8, [(4, 6), (2, 3)], [3, 2]))) | change
    with pytest.raises(ValueError, match=message):
        deformable_attention(*arguments.values())


def test_the_op_checks_again_what_it_reads() -> None:
    value, _, counts, points, weights = inputs(1, 5, 2, 8, [(4, 6), (2, 3)], [3, 2])
    op = torch.ops.hf_cpu_accel.deformable_attention
    for sizes, points_of in (
        ([4, 6, 2, 4], counts),
        ([4, 6, 2, 3], [3, 3]),
        ([4, 6], counts),
        ([-4, -6, 2, 3], counts),
    ):
        with pytest.raises(RuntimeError):
            op(value, sizes, points_of, points, weights)
    with pytest.raises(RuntimeError):
        op(value, [4, 6, 2, 3], counts, points.transpose(0, 1), weights)
