"""A layer whose weights the library keeps computes what the op computes that is given them."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hf_cpu_accel.ops.encoder_layer import (
    BoundEncoderLayer,
    EncoderInputs,
    bound_encoder_layer,
    encoder_layer,
)
from tests.ops.encoder.call import masks_of, positions_of, weights_of
from tests.ops.encoder.cases import Case

OPS = torch.ops.hf_cpu_accel
CASES = {
    "plain": Case(mask="right padding"),
    "gated": Case(norm="rms_norm", pre_norm=True, gated=True, layer_scale=True, rotary=16),
    "relative": Case(relative=3, mask="float per head, padded"),
    "positions": Case(positions="keys and queries"),
    "window": Case(window=2),
    "int8": Case(weights="int8", bf16_intermediates=True),
}


def call(case: Case, seed: int = 0) -> tuple[Tensor, EncoderInputs]:
    torch.manual_seed(seed)
    padding, mask = masks_of(case)
    given = positions_of(case)
    cos, sin = given["rotary"] or (None, None)
    positions = given["positions"] or ()
    hidden_states = torch.randn(case.batch, case.length, case.features).to(case.dtype)
    return hidden_states, EncoderInputs(
        padding, mask, given["relative"], cos, sin, given["window"] or 0, *positions
    )


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_op(name: str) -> None:
    case = CASES[name]
    hidden_states, inputs = call(case)
    weights = weights_of(case)
    bound = weights.bind()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        expected = OPS.encoder_layer(hidden_states, *inputs, *weights.arguments())
        assert torch.equal(bound_encoder_layer(hidden_states, inputs, bound), expected)


@pytest.mark.parametrize("weight", ["float32", "int8"])
def test_packed_positions_are_those_of_the_call(weight: str) -> None:
    """They are kept from one call to the next where they are small beside the weights."""
    case = Case(
        weights=weight,
        bf16_intermediates=weight == "int8",
        heads=4,
        head_size=64,
        intermediate=1024,
        batch=1,
        length=9,
        positions="keys and queries",
    )
    weights = weights_of(case)
    bound = weights.bind()
    hidden_states, first = call(case)
    _, other = call(case, seed=1)
    assert first.position_index is not None
    turned = first.position_index.flip(0)
    longer_states, longer = call(replace(case, length=14))
    calls = [
        *2 * [(hidden_states, first)],
        (hidden_states, other),
        (hidden_states, first._replace(position_keys=other.position_keys)),
        (hidden_states, first._replace(position_index=turned)),
        (hidden_states, first._replace(position_keys=None)),
        (longer_states, longer),
        (hidden_states, first._replace(position_index=first.position_index.clone())),
    ]
    for states, inputs in 2 * calls:
        expected = OPS.encoder_layer(states, *inputs, *weights.arguments())
        assert torch.equal(bound_encoder_layer(states, inputs, bound), expected)
    for seed in range(20):  # new tables, perhaps where the last ones were
        _, inputs = call(case, seed)
        expected = OPS.encoder_layer(hidden_states, *inputs, *weights.arguments())
        assert torch.equal(bound_encoder_layer(hidden_states, inputs, bound), expected)


def test_rows_of_windows() -> None:
    case = Case(scattered=Case().length)
    hidden_states, inputs = call(case)
    weights, rows = weights_of(case), positions_of(case)["rows"]
    expected = encoder_layer(hidden_states, weights, rows=rows)
    assert torch.equal(bound_encoder_layer(hidden_states, inputs, weights.bind(), rows), expected)


def test_weights_may_move_and_are_written_to() -> None:
    """As they are when a process sends them to another one."""
    hidden_states, _ = call(Case())
    weights = weights_of(Case())
    bound, before = weights.bind(), encoder_layer(hidden_states, weights)
    weights.output.data.share_memory_()
    assert torch.equal(bound_encoder_layer(hidden_states, EncoderInputs(), bound), before)
    assert weights.ffn_norm.weight is not None
    weights.ffn_norm.weight.mul_(2)
    after = encoder_layer(hidden_states, weights)
    assert not torch.equal(after, before)
    assert torch.equal(bound_encoder_layer(hidden_states, EncoderInputs(), bound), after)


def test_threads_call_at_once() -> None:
    hidden_states, inputs = call(CASES["plain"])
    layers = [weights_of(CASES["plain"]).bind() for _ in range(3)]
    expected = [bound_encoder_layer(hidden_states, inputs, layer) for layer in layers]

    def same(number: int) -> bool:
        output = bound_encoder_layer(hidden_states, inputs, layers[number % 3])
        return torch.equal(output, expected[number % 3])

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(same, range(300)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda bound: pickle.loads(pickle.dumps(bound))])
def test_copies_have_their_own(copied: Callable[[BoundEncoderLayer], BoundEncoderLayer]) -> None:
    hidden_states, inputs = call(Case())
    bound = weights_of(Case()).bind()
    expected, other = bound_encoder_layer(hidden_states, inputs, bound), copied(bound)
    number = bound.keep().number
    assert other.keep().number != number
    del bound
    gc.collect()
    assert torch.equal(bound_encoder_layer(hidden_states, inputs, other), expected)
    with pytest.raises(RuntimeError, match=f"nothing is kept under the number {number}"):
        OPS.kept_encoder_layer(hidden_states, *inputs, number)


def test_graphs_hold_the_arguments() -> None:
    hidden_states, inputs = call(Case())
    bound = weights_of(Case()).bind()
    expected = bound_encoder_layer(hidden_states, inputs, bound)
    fresh = weights_of(Case())
    assert (
        torch.compile(
            lambda states: bound_encoder_layer(states, inputs, fresh.bind()), backend="eager", fullgraph=True
        )(hidden_states).shape
        == expected.shape
    )
    compiled = torch.compile(
        lambda states: bound_encoder_layer(states, inputs, bound), backend="eager", fullgraph=True
    )
    assert torch.equal(compiled(hidden_states), expected)
    traced = torch.jit.trace(
        lambda states: bound_encoder_layer(states, inputs, bound), hidden_states, check_trace=False
    )
    assert "kept_encoder_layer" not in str(traced.graph)


def test_opcheck() -> None:
    hidden_states, inputs = call(Case())
    bound = weights_of(Case()).bind()
    torch.library.opcheck(
        OPS.kept_encoder_layer.default,
        (hidden_states, *inputs, bound.keep().number),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_bad_arguments_are_refused_as_those_of_the_other_op() -> None:
    hidden_states, inputs = call(Case())
    weights = weights_of(Case())
    bound = weights.bind()
    with pytest.raises(RuntimeError, match="does not fit"):
        bound_encoder_layer(hidden_states[..., :-1].contiguous(), inputs, bound)
    with pytest.raises(RuntimeError, match="must be float32"):
        bound_encoder_layer(hidden_states.double(), inputs, bound)
    with pytest.raises(RuntimeError, match="permutation"):
        bound_encoder_layer(hidden_states, inputs, replace(weights, qkv_order=(0, 1, 1)).bind())
