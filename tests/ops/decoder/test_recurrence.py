"""decoder_layers with recurrences in the place of attention, against its plain-torch reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_cpu_accel.ops.decoder.layers import (
    DecoderLayer,
    Projection,
    Recurrence,
    bind,
    projections_around,
)
from hf_cpu_accel.packing.linear import pack_linear
from tests.ops.decoder.bounds import bound_of, close
from tests.ops.decoder.call import Call, call_of
from tests.ops.decoder.cases import Case, layers_of

OPS = ["short_convolution", "gated_delta_net", "state_space"]
CASES = [
    Case(batch=1),
    Case(batch=3, q_len=5, past=0),
    Case(batch=2, q_len=70, past=3),  # more tokens than are taken together
    Case(residual_scale=0.22, biases=True),
    Case(norms="before and post", experts="softmax"),
    Case(norms="none", ffn=False),
    Case(dtype=torch.bfloat16, weights="bfloat16"),
    Case(weights="int8"),
    Case(weights="int4", features=128, intermediate=128),
    Case(batch=1, q_len=40, weights="int4", features=128, intermediate=128),
]


def _recurrence(op: str, case: Case, states: torch.dtype) -> tuple[DecoderLayer, list[Tensor]]:
    """A layer with one, its other parts those of `case`, and its states."""

    def projection(rows: int, columns: int) -> Projection:
        bias = 0.1 * torch.randn(rows) if case.biases else None
        return Projection(pack_linear(torch.randn(rows, columns) / columns**0.5, case.weights), bias)

    batch, features, taps = case.batch, case.features, 4
    settings: dict[str, Any]
    size: tuple[int, ...]
    if op == "short_convolution":
        channels = columns = 96
        wide, rest, size = 3 * channels, 0, (0,)
        settings = {"gate": channels, "conv_input": 2 * channels, "conv_gate": 0}
    elif op == "gated_delta_net":
        heads, key_heads, key_dim, value_dim = 4, 2, 24, 40
        columns = heads * value_dim
        channels = 2 * key_heads * key_dim + columns
        wide, rest, size = channels + columns, 2 * heads + 3, (heads, key_dim, value_dim)
        settings = {
            "heads": heads,
            "key_heads": key_heads,
            "key_dim": key_dim,
            "value_dim": value_dim,
            "conv_input": 0,
            "gate": channels,
            "beta": wide + 2,
            "decay": wide + 3 + heads,
            "norm_weight": 1 + 0.1 * torch.randn(value_dim),
        }
    else:
        heads, groups, state_dim, head_dim = 6, 2, 24, 16
        columns = heads * head_dim
        channels = columns + 2 * groups * state_dim
        wide, rest, size = columns + channels + heads, 0, (heads, head_dim, state_dim)
        settings = {
            "heads": heads,
            "key_heads": groups,
            "key_dim": state_dim,
            "value_dim": head_dim,
            "gate": 0,
            "conv_input": columns,
            "decay": columns + channels,
            "D": torch.randn(heads),
            "norm_weight": 1 + 0.1 * torch.randn(columns),
            "norm_groups": 2,
            "gate_first": True,
        }
    if op != "short_convolution":
        settings |= {"A_log": torch.rand(heads), "dt_bias": torch.randn(heads), "norm_eps": 1e-6}
    recurrence = Recurrence(
        op,  # type: ignore[arg-type]
        torch.randn(channels, 1, taps) / 2,
        0.1 * torch.randn(channels) if case.biases else None,
        rest=projection(rest, features) if rest else None,
        **settings,
    )
    around = projections_around(projection(wide, features), projection(features, columns))
    layer = replace(layers_of(replace(case, layers=1))[0], attention=around, recurrence=recurrence)
    return layer, [torch.randn(batch, channels, taps).to(states), 0.3 * torch.randn(batch, *size)]


def _call(op: str, case: Case, states: torch.dtype = torch.float32) -> Call:
    """Attention between two layers with a recurrence."""
    torch.manual_seed(0)
    call = call_of(case)
    first, last = (_recurrence(op, case, states) for _ in range(2))
    call.layers = bind([first[0], *layers_of(case), last[0]])
    call.keys = [first[1][0], *call.keys, last[1][0]]
    call.values = [first[1][1], *call.values, last[1][1]]
    call.past = [0, *call.past, 0]
    return call


def _compare(call: Call, bound: float) -> None:
    output, keys, values = call.run()
    expected, expected_keys, expected_values = call.reference()
    close(output, expected, bound, "output")
    for number in (0, -1):
        close(keys[number], expected_keys[number], bound, "conv_state")
        close(values[number], expected_values[number], bound, "state")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(op: str, case: Case) -> None:
    _compare(_call(op, case, case.dtype), 2 * bound_of(case))


@pytest.mark.parametrize("op", OPS)
def test_one_thread(op: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _compare(_call(op, Case(q_len=3)), 2 * bound_of(Case()))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("op", OPS)
def test_padding_and_rows_are_refused(op: str) -> None:
    padded = _call(op, Case(q_len=4, past=0))
    padded.start = torch.tensor([2, 0], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="no rows and no padding"):
        padded.run()
    with pytest.raises(RuntimeError, match="no rows and no padding"):
        _call(op, Case(rows=True)).run()


@pytest.mark.parametrize(
    "column", ["conv_input", "gate", "decay", "kind", "key_dim", "channels", "taps", "conv_weight"]
)
def test_a_layout_that_is_not_of_bind_is_refused(column: str) -> None:
    from hf_cpu_accel.ops.decoder.bind import LAYOUT

    for value in (-1, 2**40):
        call = _call("state_space", Case())
        call.layers.layout[0, LAYOUT.index(f"recurrence_{column}")] = value
        with pytest.raises(RuntimeError, match="hf_cpu_accel::decoder_layers"):
            call.run()


def test_states_of_other_shapes_are_refused() -> None:
    for place in ("keys", "values"):
        call = _call("gated_delta_net", Case())
        getattr(call, place)[0] = getattr(call, place)[0][:, 1:].contiguous()
        with pytest.raises(RuntimeError, match=f"{place} must be contiguous"):
            call.run()


def test_parts_that_do_not_fit_are_refused() -> None:
    layer, _ = _recurrence("gated_delta_net", Case(), torch.float32)
    assert layer.recurrence is not None
    with pytest.raises(ValueError, match="the output projection takes"):
        bind([replace(layer, recurrence=replace(layer.recurrence, heads=3))])
