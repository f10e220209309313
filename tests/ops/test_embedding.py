"""Embeddings with their norm against float64, over shapes, dtypes, kinds of positions, layouts and thread counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_cpu_accel.ops.embedding import embedding_norm, embedding_norm_reference

EPS = 1e-12
DTYPES = [torch.float32, torch.bfloat16]
COLUMNS = [1, 7, 15, 16, 17, 33, 64, 200, 384, 768, 1025]
PADDING = 1
# Relative to the largest value of the output row: float32 sums in another order, and the rounding of a bfloat16 output.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}


def truth_of(
    ids: Tensor,
    words: Tensor,
    type_ids: Tensor | None,
    types: Tensor | None,
    position_ids: Tensor | None,
    positions: Tensor | None,
    first: int,
    padding_id: int | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Token by token, as the docstring of the op says it."""
    output = torch.empty(*ids.shape, words.shape[1], dtype=torch.float64)
    for b in range(ids.shape[0]):
        counted = 0
        for i in range(ids.shape[1]):
            row = words[ids[b, i]].double()
            if types is not None:
                row = row + types[0 if type_ids is None else type_ids[b % type_ids.shape[0], i]].double()
            is_padding = padding_id is not None and ids[b, i] == padding_id
            if positions is not None:
                place = first - 1 if is_padding else first + counted
                place = place if position_ids is None else position_ids[b % position_ids.shape[0], i]
                row = row + positions[place].double()
            counted += not is_padding
            # The sum is float32: what is normalized is that, not the exact one.
            row = row.float().double() - row.float().double().mean()
            row = row / (row.square().mean() + EPS).sqrt()
            row = row if weight is None else row * weight.double()
            output[b, i] = row if bias is None else row + bias.double()
    return output


def arguments(
    batch: int, length: int, columns: int, dtype: torch.dtype, *, tables: int, positions: str, seed: int
) -> tuple[object, ...]:
    """The op's arguments but for eps.

    One table is words, two are words and positions, three are all; `positions` is "counted", "padded" or "given".
    """
    g = torch.Generator().manual_seed(seed)

    def table(rows: int) -> Tensor:
        return torch.randn(rows, columns, generator=g).to(dtype)

    ids = torch.randint(0, 50, (batch, length), generator=g)
    ids[torch.rand(batch, length, generator=g) < 0.3] = PADDING
    first = PADDING + 1 if positions == "padded" else int(torch.randint(0, 3, (1,), generator=g))
    given = torch.randint(0, 60, (1 if seed % 2 else batch, length), generator=g)
    type_ids = torch.randint(0, 2, (batch, length), generator=g) if seed % 3 else None
    return (
        ids,
        table(50),
        type_ids if tables == 3 else None,
        table(2) if tables == 3 else None,
        given if positions == "given" and tables > 1 else None,
        table(60) if tables > 1 else None,
        first,
        PADDING if positions == "padded" else None,
        torch.randn(columns, generator=g) if seed % 4 else None,
        torch.randn(columns, generator=g).to(dtype) if seed % 5 else None,
    )


def check(*args: object, what: str = "") -> Tensor:
    """One call against the truth; raises AssertionError."""
    got = torch.ops.hf_cpu_accel.embedding_norm(*args, EPS)
    ids, words = args[:2]
    assert isinstance(ids, Tensor)
    assert isinstance(words, Tensor)
    truth = truth_of(*args)  # type: ignore[arg-type]
    assert (got.shape, got.dtype, got.is_contiguous()) == (truth.shape, words.dtype, True), what
    if got.numel():
        error = (got.double() - truth).abs() / truth.abs().amax(dim=-1, keepdim=True).clamp_min(0.1)
        assert error.max() <= BOUNDS[words.dtype], f"{what}: {error.max():.1e}"
    return got


def check_embedding(seed: int = 0) -> None:
    """All of it in one call, for the test that repeats it on every instruction-set tier."""
    for dtype in DTYPES:
        for columns in COLUMNS[1:]:
            for tables, positions in ((1, "counted"), (2, "padded"), (3, "given"), (3, "counted")):
                args = arguments(2, 5, columns, dtype, tables=tables, positions=positions, seed=seed)
                check(*args, what=f"{columns} columns, {dtype}, {tables} tables, {positions}")


@pytest.mark.parametrize("seed", range(5))
def test_all_kinds(seed: int) -> None:
    check_embedding(seed)


@given(
    batch=st.integers(0, 5),
    length=st.integers(0, 40),
    columns=st.integers(8, 200),
    dtype=st.sampled_from(DTYPES),
    tables=st.integers(1, 3),
    positions=st.sampled_from(["counted", "padded", "given"]),
    seed=st.integers(0, 99),
)
def test_random_shapes(
    batch: int, length: int, columns: int, dtype: torch.dtype, tables: int, positions: str, seed: int
) -> None:
    check(*arguments(batch, length, columns, dtype, tables=tables, positions=positions, seed=seed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_thread_count_does_not_change_the_result(dtype: torch.dtype) -> None:
    args = arguments(9, 40, 384, dtype, tables=3, positions="padded", seed=1)
    torch.set_num_threads(1)
    one = torch.ops.hf_cpu_accel.embedding_norm(*args, EPS)
    torch.set_num_threads(2)
    assert torch.equal(torch.ops.hf_cpu_accel.embedding_norm(*args, EPS), one)


def test_layouts_and_integer_types_change_nothing() -> None:
    ids, words, type_ids, types, position_ids, positions, *rest = arguments(
        3, 6, 24, torch.float32, tables=3, positions="given", seed=2
    )
    assert all(isinstance(t, Tensor) for t in (ids, words, type_ids, types, position_ids, positions))
    expected = check(ids, words, type_ids, types, position_ids, positions, *rest)
    layouts: list[Callable[[Tensor], Tensor]] = [
        lambda t: t.int(),
        lambda t: t.T.contiguous().T,
        lambda t: torch.zeros(t.shape[0], 2 * t.shape[1], dtype=t.dtype)[:, ::2].copy_(t),
    ]
    for layout in layouts:
        got = torch.ops.hf_cpu_accel.embedding_norm(
            layout(ids), words, layout(type_ids), types, layout(position_ids), positions, *rest, EPS
        )
        assert torch.equal(got, expected)
    for layout in layouts[1:]:  # tables
        got = torch.ops.hf_cpu_accel.embedding_norm(
            ids, layout(words), type_ids, layout(types), position_ids, layout(positions), *rest, EPS
        )
        assert torch.equal(got, expected)


@pytest.mark.parametrize("tables", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_agrees(dtype: torch.dtype, tables: int) -> None:
    for seed, positions in enumerate(("counted", "padded", "given")):
        args = arguments(3, 7, 40, dtype, tables=tables, positions=positions, seed=seed)
        got, expected = (
            torch.ops.hf_cpu_accel.embedding_norm(*args, EPS),
            embedding_norm_reference(*args, EPS),
        )  # type: ignore[arg-type]
        torch.testing.assert_close(got.float(), expected.float(), rtol=2 * BOUNDS[dtype], atol=1e-5)


@pytest.mark.parametrize(
    "wrong", ["id", "negative id", "type id", "position", "too long", "too long after padding"]
)
def test_rows_out_of_range_are_index_errors(wrong: str) -> None:
    ids, words, types, positions = (
        torch.full((2, 4), 3),
        torch.randn(9, 8),
        torch.randn(2, 8),
        torch.randn(5, 8),
    )
    other = torch.zeros(1, 4, dtype=torch.long)
    other[0, 2] = {"type id": 2, "position": 5}.get(wrong, 0)
    ids[1, 3] = {"id": 9, "negative id": -1}.get(wrong, 3)
    calls: dict[str, dict[str, object]] = {
        "type id": {"type_ids": other, "types": types},
        "position": {"position_ids": other, "positions": positions},
        "too long": {"positions": positions, "first_position": 2},
        "too long after padding": {"positions": positions, "first_position": 2, "padding_id": 7},
    }
    with pytest.raises(IndexError, match=r"out of range"):
        embedding_norm(ids, words, eps=EPS, **calls.get(wrong, {}))  # type: ignore[arg-type]
    reference = [
        calls.get(wrong, {}).get(name) for name in ("type_ids", "types", "position_ids", "positions")
    ]
    with pytest.raises(IndexError, match=r"out of range"):
        embedding_norm_reference(
            ids, words, *reference, calls.get(wrong, {}).get("first_position", 0), None, None, None, EPS
        )  # type: ignore[arg-type]


def test_bad_shapes_are_named() -> None:
    ids, words = torch.zeros(2, 4, dtype=torch.long), torch.zeros(9, 8)
    with pytest.raises(ValueError, match=r"ids of shape \(4,\)"):
        embedding_norm(ids[0], words, eps=EPS)
    with pytest.raises(ValueError, match=r"types of shape \(2, 7\)"):
        embedding_norm(ids, words, types=torch.zeros(2, 7), eps=EPS)
    with pytest.raises(ValueError, match="type_ids without types"):
        embedding_norm(ids, words, type_ids=ids, eps=EPS)
    with pytest.raises(ValueError, match=r"position_ids of shape \(2, 3\)"):
        embedding_norm(ids, words, positions=words, position_ids=ids[:, :3], eps=EPS)
    with pytest.raises(ValueError, match=r"bias of shape \(7,\)"):
        embedding_norm(ids, words, bias=torch.zeros(7), eps=EPS)
    with pytest.raises(RuntimeError, match="ids must be int64 or int32"):
        embedding_norm(ids.float(), words, eps=EPS)
    with pytest.raises(RuntimeError, match="types must have 8 columns and the dtype of words"):
        embedding_norm(ids, words, types=words.bfloat16(), eps=EPS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    for tables, positions in ((1, "counted"), (2, "padded"), (3, "given")):
        args = arguments(2, 5, 24, dtype, tables=tables, positions=positions, seed=1)
        torch.library.opcheck(torch.ops.hf_cpu_accel.embedding_norm, (*args, EPS))


def test_traces_with_symbolic_shapes() -> None:
    words, positions = torch.randn(50, 24), torch.randn(60, 24)

    def block(ids: Tensor) -> Tensor:
        return (
            embedding_norm(ids, words, positions=positions, padding_id=PADDING, first_position=2, eps=EPS) * 2
        )

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((2, 5), (3, 9), (2, 40)):
        ids = torch.randint(0, 50, shape)
        assert torch.equal(compiled(ids), block(ids))
