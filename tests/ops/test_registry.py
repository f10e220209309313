"""Arguments of ops by name."""

from __future__ import annotations

import pytest
import torch

from hf_cpu_accel.ops.encoder_layer import EncoderInputs
from hf_cpu_accel.ops.registry import positional

OPS = torch.ops.hf_cpu_accel


def test_names_go_into_the_order_of_the_schema() -> None:
    named = {"activation": "none", "out_features": 8, "weight": "w", "input": "x", "bias": "b"}
    assert positional(OPS.linear.default, named) == ("x", "w", None, "b", None, 8, "none")
    rest = {name: named[name] for name in ("activation", "out_features", "bias")}
    assert positional(OPS.linear.default, rest, first=2) == (None, "b", None, 8, "none")


def test_defaults_at_the_end_are_left_out() -> None:
    names = [argument.name for argument in OPS.gated_ffn.default._schema.arguments]
    arguments = positional(OPS.gated_ffn.default, dict.fromkeys(names[:-1], 1))
    assert len(arguments) == len(names) - 1
    assert positional(OPS.gated_ffn.default, dict.fromkeys(names, 1)) == (*arguments, 1)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"input": 1, "weights": 2}, "no argument weights"),
        ({"input": 1}, "the required argument weight is missing"),
    ],
)
def test_names_that_do_not_fit(named: dict[str, int], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        positional(OPS.linear.default, named)


def test_the_inputs_of_an_encoder_layer_are_those_of_its_schema() -> None:
    names = [argument.name for argument in OPS.encoder_layer.default._schema.arguments]
    assert tuple(names[1 : 1 + len(EncoderInputs._fields)]) == EncoderInputs._fields
