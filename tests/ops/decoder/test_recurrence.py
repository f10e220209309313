"""decoder_layers with recurrences in the place of attention, against its plain-torch reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_cpu_accel.abi import LayerLayout, columns
from hf_cpu_accel.ops.decoder.layers import bind
from tests.ops.decoder.bounds import bound_of, close
from tests.ops.decoder.call import Call
from tests.ops.decoder.cases import Case
from tests.ops.decoder.recurrences import OPS, Sizes, recurrence, recurrent_call

CASES = [
    Case(batch=1),
    Case(mask="float per head"),  # of the layer that attends
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


SIZES = {"state_space": Sizes(heads=6, value_dim=16)}


def _call(op: str, case: Case, states: torch.dtype = torch.float32, sizes: Sizes | None = None) -> Call:
    torch.manual_seed(0)
    return recurrent_call(op, case, sizes or SIZES.get(op, Sizes()), states)


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
@pytest.mark.parametrize("taps", [1, 2, 3, 5])
@pytest.mark.parametrize("q_len", [1, 3, 70])
def test_other_numbers_of_taps(op: str, taps: int, q_len: int) -> None:
    sizes = Sizes(taps=taps, channels=101, heads=6, value_dim=17, norm_groups=3)
    for states in (torch.float32, torch.bfloat16):
        bound = 2 * bound_of(Case(cache=states))
        _compare(_call(op, Case(q_len=q_len, past=0), states, sizes), bound)


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_gates_and_norms_of_a_state_space(q_len: int, gate_first: bool, normed: bool) -> None:
    sizes = Sizes(heads=6, key_heads=3, value_dim=20, norm_groups=1, gate_first=gate_first, normed=normed)
    _compare(_call("state_space", Case(q_len=q_len), sizes=sizes), 2 * bound_of(Case()))


@pytest.mark.parametrize("q_len", [1, 3, 70])
@pytest.mark.parametrize("key_dim", [1, 16, 33])
@pytest.mark.parametrize("normed", [False, True])
def test_sizes_and_norms_of_a_selective_scan(q_len: int, key_dim: int, normed: bool) -> None:
    sizes = Sizes(channels=131, key_dim=key_dim, normed=normed)
    _compare(_call("selective_scan", Case(q_len=q_len), sizes=sizes), 2 * bound_of(Case()))


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
    for value in (-1, 2**40):
        call = _call("state_space", Case())
        call.layers.layout[0, columns(LayerLayout).index(f"recurrence.{column}")] = value
        with pytest.raises(RuntimeError, match="hf_cpu_accel::decoder_layers"):
            call.run()


@pytest.mark.parametrize(
    "column",
    [
        "selected.weight",
        "steps.weight",
        "selected_features",
        "rest_features",
        "key_dim",
        "A_log",
        "D",
        "B_norm",
        "channels",
    ],
)
def test_a_layout_of_a_selective_scan_that_is_not_of_bind_is_refused(column: str) -> None:
    for value in (-1, 2**40) if column != "rest_features" else (1, 2**40):
        call = _call("selective_scan", Case())
        call.layers.layout[0, columns(LayerLayout).index(f"recurrence.{column}")] = value
        with pytest.raises(RuntimeError, match="hf_cpu_accel::decoder_layers"):
            call.run()


def test_states_of_other_shapes_are_refused() -> None:
    for place in ("keys", "values"):
        call = _call("gated_delta_net", Case())
        getattr(call, place)[0] = getattr(call, place)[0][:, 1:].contiguous()
        with pytest.raises(RuntimeError, match=f"{place} must be contiguous"):
            call.run()


def test_parts_that_do_not_fit_are_refused() -> None:
    layer, _ = recurrence("gated_delta_net", Case(), Sizes(), torch.float32)
    assert layer.recurrence is not None
    with pytest.raises(ValueError, match="the output projection has"):
        bind([replace(layer, recurrence=replace(layer.recurrence, heads=3))])
    layer, _ = recurrence("selective_scan", Case(), Sizes(), torch.float32)
    assert layer.recurrence is not None
    with pytest.raises(ValueError, match="a selective scan requires"):
        bind([replace(layer, recurrence=replace(layer.recurrence, steps=None))])
    with pytest.raises(ValueError, match="selected and steps of a selective scan have"):
        bind([replace(layer, recurrence=replace(layer.recurrence, key_dim=5))])
