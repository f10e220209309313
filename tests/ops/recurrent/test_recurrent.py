"""The ops of recurrent layers against float64, over shapes, dtypes, layouts, states and thread counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_cpu_accel.ops.recurrent.gated_delta_net import gated_delta_net_reference
from hf_cpu_accel.ops.recurrent.selective_scan import causal_convolution_reference, selective_scan_reference
from hf_cpu_accel.ops.recurrent.short_convolution import short_convolution_reference
from hf_cpu_accel.ops.recurrent.state_space import state_space_reference

OPS = torch.ops.hf_cpu_accel
DTYPES = [torch.float32, torch.bfloat16]
LENGTHS = [1, 2, 5, 64, 67, 150]  # around the 64 tokens that are taken together
Case = tuple[Any, Callable[..., Tensor], tuple[Any, ...]]


def _states(g: torch.Generator, *shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    conv, *others = (torch.randn(shape, generator=g) for shape in shapes)
    return [conv.to(dtype), *others]


def short_convolution(
    length: int, dtype: torch.dtype, *, channels: int = 100, taps: int = 3, seed: int = 0
) -> Case:
    g = torch.Generator().manual_seed(seed)
    wide = torch.randn(2, length, 3 * channels + 8, generator=g).to(dtype)
    bias = torch.randn(channels, generator=g).to(dtype) if taps % 2 else None
    (state,) = _states(g, (2, channels, taps), dtype=dtype)
    arguments = (
        wide[..., : 3 * channels],
        torch.randn(channels, 1, taps, generator=g).to(dtype),
        bias,
        state,
    )
    return OPS.short_convolution.default, short_convolution_reference, arguments


def gated_delta_net(
    length: int,
    dtype: torch.dtype,
    *,
    heads: int = 4,
    key_heads: int = 2,
    key_dim: int = 16,
    value_dim: int = 24,
    seed: int = 0,
) -> Case:
    g = torch.Generator().manual_seed(seed)
    values = heads * value_dim
    channels = 2 * key_heads * key_dim + values
    joined = torch.randn(2, length, channels + values + 2 * heads, generator=g).to(dtype)
    parts = joined.split([channels, values, heads, heads], dim=-1)
    states = _states(g, (2, channels, 4), (2, heads, key_dim, value_dim), dtype=dtype)
    A_log, dt_bias = torch.randn(heads, generator=g), torch.randn(heads, generator=g).to(dtype)
    weight = torch.randn(channels, 1, 4, generator=g).to(dtype)
    bias = torch.randn(channels, generator=g) if heads == 4 else None
    norm_weight = (torch.rand(value_dim, generator=g) + 0.5).to(dtype)
    arguments = (*parts, weight, bias, A_log, dt_bias, norm_weight, 1e-6, *states)
    return OPS.gated_delta_net.default, gated_delta_net_reference, arguments


def state_space(
    length: int,
    dtype: torch.dtype,
    *,
    heads: int = 6,
    head_dim: int = 10,
    state_dim: int = 24,
    groups: int = 2,
    norm_groups: int = 1,
    gate_first: bool = True,
    bounds: tuple[float, float] = (0.0, float("inf")),
    seed: int = 0,
) -> Case:
    g = torch.Generator().manual_seed(seed)
    columns = heads * head_dim
    channels = columns + 2 * groups * state_dim
    projected = torch.randn(2, length, columns + channels + heads, generator=g).to(dtype)
    states = _states(g, (2, channels, 4), (2, heads, head_dim, state_dim), dtype=dtype)
    vectors = [torch.randn(heads, generator=g).to(dtype) for _ in range(3)]
    weight = None if groups == 1 else torch.rand(columns, generator=g) + 0.5
    tokens = None if length == 1 else torch.rand(2, length, generator=g) > 0.3
    conv = (torch.randn(channels, 1, 4, generator=g).to(dtype), torch.randn(channels, generator=g))
    arguments = (projected, *conv, *vectors, weight, 1e-5, norm_groups, gate_first, *bounds, tokens, *states)
    return OPS.state_space.default, state_space_reference, arguments


def causal_convolution(
    length: int, dtype: torch.dtype, *, channels: int = 100, taps: int = 4, seed: int = 0
) -> Case:
    g = torch.Generator().manual_seed(seed)
    wide = torch.randn(2, length, channels + 8, generator=g).to(dtype)
    bias = torch.randn(channels, generator=g) if taps % 2 == 0 else None
    tokens = None if length == 1 else torch.rand(2, length, generator=g) > 0.3
    (state,) = _states(g, (2, channels, taps), dtype=dtype)
    weight = torch.randn(channels, 1, taps, generator=g).to(dtype)
    arguments = (wide[..., :channels], weight, bias, tokens, state)
    return OPS.causal_convolution.default, causal_convolution_reference, arguments


def selective_scan(
    length: int, dtype: torch.dtype, *, channels: int = 100, state_dim: int = 16, seed: int = 0
) -> Case:
    g = torch.Generator().manual_seed(seed)
    wide = torch.randn(2, length, 3 * channels + 2 * state_dim + 3, generator=g).to(dtype)
    parts = wide.split([channels, channels, state_dim, state_dim, channels, 3], dim=-1)[:-1]
    A_log = torch.randn(channels, state_dim, generator=g).to(dtype)
    (state,) = _states(g, (2, channels, state_dim), dtype=torch.float32)
    arguments = (*parts, A_log, torch.randn(channels, generator=g), state)
    return OPS.selective_scan.default, selective_scan_reference, arguments


MAKERS = [short_convolution, gated_delta_net, state_space, causal_convolution, selective_scan]


def _copies(arguments: tuple[Any, ...], *, double: bool) -> list[Any]:
    """Copies of the states, in float64 if `double` as all else."""
    return [
        value
        if not isinstance(value, Tensor)
        else value.double()
        if double and value.is_floating_point()
        else value.clone()
        if value.is_contiguous()
        else value
        for value in arguments
    ]


def check(case: Case) -> None:
    """The output and the states."""
    op, reference, arguments = case
    ours, theirs = _copies(arguments, double=False), _copies(arguments, double=True)
    got, truth = op(*ours), reference(*theirs)
    assert got.dtype == (torch.float32 if op is OPS.causal_convolution.default else arguments[0].dtype)
    assert got.is_contiguous()
    for result, expected in ((got, truth), *zip(ours, theirs, strict=True)):
        if isinstance(result, Tensor) and result.is_floating_point():
            rounding = 2.0**-8 if result.dtype is torch.bfloat16 else 0.0
            torch.testing.assert_close(result.double(), expected, atol=2e-4, rtol=2e-4 + rounding)


def check_recurrent(seed: int = 0) -> None:
    """All of it in one call, for the test that repeats it on every instruction-set tier."""
    for dtype in DTYPES:
        for length in (1, 3, 67):
            for make in MAKERS:
                check(make(length, dtype, seed=seed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("make", MAKERS)
def test_lengths(make: Callable[..., Case], length: int, dtype: torch.dtype) -> None:
    check(make(length, dtype))


@pytest.mark.parametrize("taps", [1, 2, 4, 7])
@pytest.mark.parametrize("channels", [1, 63, 64, 65, 200])
def test_convolutions(channels: int, taps: int) -> None:
    check(short_convolution(9, torch.float32, channels=channels, taps=taps))
    check(causal_convolution(9, torch.float32, channels=channels, taps=taps))


@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (2, 2), (6, 2)])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(1, 1), (16, 64), (33, 70), (128, 128)])
def test_sizes_of_gated_delta_nets(heads: int, key_heads: int, key_dim: int, value_dim: int) -> None:
    check(
        gated_delta_net(
            5, torch.float32, heads=heads, key_heads=key_heads, key_dim=key_dim, value_dim=value_dim
        )
    )


@pytest.mark.parametrize(("head_dim", "state_dim"), [(1, 1), (4, 16), (7, 33), (64, 128)])
@pytest.mark.parametrize(("groups", "norm_groups"), [(1, 1), (2, 2), (6, 3)])
@pytest.mark.parametrize("gate_first", [False, True])
def test_sizes_of_state_spaces(
    head_dim: int, state_dim: int, groups: int, norm_groups: int, gate_first: bool
) -> None:
    sizes = {"head_dim": head_dim, "state_dim": state_dim, "groups": groups, "norm_groups": norm_groups}
    check(state_space(5, torch.float32, gate_first=gate_first, **sizes))


@pytest.mark.parametrize("bounds", [(0.5, float("inf")), (0.0, 0.5), (0.3, 0.6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bounds_of_the_time_steps_of_a_state_space(dtype: torch.dtype, bounds: tuple[float, float]) -> None:
    check(state_space(5, dtype, bounds=bounds))


@pytest.mark.parametrize("bounds", [(-0.1, 1.0), (0.6, 0.3), (float("nan"), 1.0)])
def test_bounds_that_are_none_are_refused(bounds: tuple[float, float]) -> None:
    op, _, arguments = state_space(5, torch.float32, bounds=bounds)
    with pytest.raises(RuntimeError, match="least_dt must be from 0 to most_dt"):
        op(*arguments)


@pytest.mark.parametrize("channels", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("state_dim", [1, 7, 8, 16, 33])
def test_sizes_of_selective_scans(channels: int, state_dim: int) -> None:
    for length in (1, 5):
        check(selective_scan(length, torch.float32, channels=channels, state_dim=state_dim))


@pytest.mark.parametrize("make", MAKERS)
def test_two_threads_give_what_one_gives(make: Callable[..., Case]) -> None:
    op, _, arguments = make(70, torch.float32)
    results = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            given = _copies(arguments, double=False)
            results.append((op(*given), given))
        finally:
            torch.set_num_threads(before)
    (one, states), (other, others) = results
    assert torch.equal(one, other)
    assert all(torch.equal(a, b) for a, b in zip(states, others, strict=True) if isinstance(a, Tensor))


@pytest.mark.parametrize("make", MAKERS)
def test_a_prompt_may_come_in_parts(make: Callable[..., Case]) -> None:
    op, _, arguments = make(70, torch.float32)
    whole = _copies(arguments, double=False)
    expected = op(*whole)
    given, outputs = _copies(arguments, double=False), []
    for part in (slice(0, 41), slice(41, 42), slice(42, 70)):
        cut = [
            v[:, part].contiguous() if isinstance(v, Tensor) and v.shape[:2] == (2, 70) else v for v in given
        ]
        outputs.append(op(*cut))
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected)
    for a, b in zip(given, whole, strict=True):
        if isinstance(a, Tensor):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("make", MAKERS)
def test_opcheck(make: Callable[..., Case]) -> None:
    op, _, arguments = make(3, torch.float32)
    torch.library.opcheck(op, tuple(_copies(arguments, double=False)))


@pytest.mark.parametrize("make", MAKERS)
def test_states_of_another_shape_are_refused(make: Callable[..., Case]) -> None:
    op, _, arguments = make(3, torch.float32)
    with pytest.raises(RuntimeError, match=r"must be|does not hold"):
        op(*arguments[:-1], arguments[-1][:1].contiguous())
    with pytest.raises(RuntimeError, match="must be"):
        op(*arguments[:-1], arguments[-1].double())
