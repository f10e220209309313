"""lstm_layer against the reference and torch's own in float64, over shapes, dtypes, directions and thread counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel.ops.recurrent.lstm_layer import lstm_layer, lstm_layer_reference
from hf_cpu_accel.packing.linear import PackedWeight, pack_linear

OPS = torch.ops.hf_cpu_accel
# Steps, sequences, features of a cell, of what is projected of it (0: nothing).
SHAPES = [(1, 1, 8, 0), (5, 2, 33, 0), (4, 1, 130, 0), (3, 19, 64, 0), (6, 3, 70, 17), (2, 1, 256, 64)]
BOUNDS = {"float32": 1e-5, "bfloat16": 3e-2, "int8": 3e-2}  # beside numbers in (-1, 1)
Case = tuple[Tensor, PackedWeight, PackedWeight | None, Tensor, Tensor]


def _case(length: int, batch: int, features: int, projected: int, dtype: str, seed: int = 0) -> Case:
    g = torch.Generator().manual_seed(seed)
    outputs = projected or features
    weight = torch.randn(4 * features, outputs, generator=g) / outputs**0.5
    projection = torch.randn(outputs, features, generator=g) / features**0.5
    gates = torch.randn(length, batch, 4 * features, generator=g)
    hidden, cell = (torch.randn(batch, size, generator=g) for size in (outputs, features))
    packed = pack_linear(projection, dtype) if projected else None
    return gates, pack_linear(weight, dtype), packed, hidden, cell


def _arguments(case: Case, *, reverse: bool) -> tuple[object, ...]:
    gates, weight, projection, hidden, cell = case
    second = (None, None) if projection is None else (projection.data, projection.scale)
    return (gates, weight.data, weight.scale, *second, hidden, cell.clone(), reverse)


def check_one(case: Case, dtype: str, *, reverse: bool) -> None:
    """The output and the last cells."""
    gates, weight, projection, hidden, cell = case
    cells = cell.clone()
    ours = lstm_layer(gates, weight, projection, hidden, cells, reverse=reverse)
    theirs = _arguments(case, reverse=reverse)
    expected = lstm_layer_reference(*theirs)  # type: ignore[arg-type]
    assert ours.is_contiguous()
    for result, truth in ((ours, expected), (cells, theirs[6])):
        assert isinstance(truth, Tensor)
        # Cells grow with the steps: the bound is beside the largest.
        assert (result - truth).abs().max() <= BOUNDS[dtype] * max(1.0, float(truth.abs().max()))


def check_lstm(seed: int = 0) -> None:
    """All of it in one call, for the test that repeats it on every instruction-set tier."""
    for dtype in BOUNDS:
        for shape in SHAPES:
            for reverse in (False, True):
                check_one(_case(*shape, dtype, seed), dtype, reverse=reverse)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, int, int, int], dtype: str, reverse: bool) -> None:
    check_one(_case(*shape, dtype), dtype, reverse=reverse)


@pytest.mark.parametrize("projected", [0, 24])
def test_it_is_what_torch_computes(projected: int) -> None:
    """In float64, with the inputs' products made by hand."""
    torch.manual_seed(0)
    lstm = nn.LSTM(16, 40, proj_size=projected).double()
    rows = torch.randn(7, 3, 16).double()
    states = [torch.randn(1, 3, size).double() for size in (projected or 40, 40)]
    with torch.no_grad():
        expected, (_, last) = lstm(rows, tuple(states))
        gates = rows @ lstm.weight_ih_l0.T + lstm.bias_ih_l0 + lstm.bias_hh_l0
        packed = [pack_linear(lstm.weight_hh_l0.float(), "float32"), None]
        if projected:
            packed[1] = pack_linear(lstm.weight_hr_l0.float(), "float32")
    hidden, cell = (state[0].float() for state in states)
    ours = lstm_layer(gates.float(), *packed, hidden, cell)
    torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cell.double(), last[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_two_threads_give_what_one_gives(dtype: str) -> None:
    results = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            case = _case(6, 3, 300, 70, dtype)
            results.append((lstm_layer(*case), case[4]))
        finally:
            torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


def test_a_sequence_may_come_in_parts() -> None:
    gates, weight, projection, hidden, cell = _case(9, 2, 64, 16, "int8")
    whole = lstm_layer(gates, weight, projection, hidden, cell.clone())
    parts = []
    for part in (gates[:4], gates[4:5], gates[5:]):
        parts.append(lstm_layer(part, weight, projection, hidden, cell))
        hidden = parts[-1][-1]
    assert torch.equal(torch.cat(parts), whole)


def test_what_is_no_number_stays_so() -> None:
    gates, weight, projection, hidden, cell = _case(3, 2, 40, 0, "float32")
    gates[1, 0, 5] = torch.nan
    output = lstm_layer(gates, weight, projection, hidden, cell)
    assert not output[0].isnan().any()
    assert output[1, 0, 5].isnan()
    assert output[2, 0].isnan().all()
    assert not output[:, 1].isnan().any()


@pytest.mark.parametrize("projected", [0, 17])
def test_opcheck(projected: int) -> None:
    arguments = _arguments(_case(3, 2, 40, projected, "int8"), reverse=False)
    torch.library.opcheck(OPS.lstm_layer.default, arguments)


def test_others_are_refused() -> None:
    gates, weight, projection, hidden, cell = _case(3, 2, 40, 17, "float32")
    for wrong, words in (
        ((gates.bfloat16(), weight, projection, hidden, cell), "gates must be"),
        ((gates[..., :-1].contiguous(), weight, projection, hidden, cell), "gates must be"),
        ((gates.mT.contiguous().mT, weight, projection, hidden, cell), "gates must be"),
        ((gates[:0], weight, projection, hidden, cell), "at least one step"),
        ((gates, weight, projection, hidden[:1].contiguous(), cell), "hidden must be"),
        ((gates, weight, projection, hidden, cell.double()), "cell must be"),
        ((gates, weight, None, hidden, cell), "hidden must be"),
        ((gates, projection, projection, hidden, cell), "does not fit"),
    ):
        with pytest.raises(RuntimeError, match=words):
            lstm_layer(*wrong)
