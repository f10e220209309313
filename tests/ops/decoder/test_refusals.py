"""What decoder_layers and its parts are told when they do not fit, each by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_cpu_accel.ops.decoder.layers import (
    DecoderLayer,
    Gate,
    Heads,
    MixtureOfExperts,
    Norm,
    PerLayerInput,
    Projection,
    bind,
)
from hf_cpu_accel.packing.linear import pack_linear
from tests.ops.decoder.call import call_of
from tests.ops.decoder.cases import Case, layers_of


def test_bad_arguments() -> None:
    call = call_of(Case())
    with pytest.raises(ValueError, match=r"must be \[batch, q_len, 64\]"):
        replace(call, hidden_states=torch.randn(2, 1, 63)).run()
    with pytest.raises(ValueError, match="1 keys, 2 values and 2 lengths"):
        replace(call, keys=call.keys[:1]).run()
    with pytest.raises(ValueError, match="rotary has 0 tables"):
        replace(call, rotary=[]).run()
    with pytest.raises(ValueError, match="the last 12"):
        replace(call, mask=torch.zeros(2, 1, 1, 11)).run()
    with pytest.raises(ValueError, match="must be 0 each"):
        replace(call, cross_keys=call.keys).run()
    crossing = call_of(Case(cross="padding"))
    with pytest.raises(RuntimeError, match="cross_values must be"):
        replace(crossing, cross_values=[x[:, :, 1:] for x in crossing.cross_values]).run()
    with pytest.raises(RuntimeError, match="cross_rows names rows"):
        replace(crossing, cross_rows=torch.tensor([0, 2], dtype=torch.int32)).run()
    with pytest.raises(RuntimeError, match="cross_rows must be int32"):
        replace(crossing, cross_rows=torch.tensor([0, 1])).run()
    with pytest.raises(RuntimeError, match="cross_padding must be boolean"):
        replace(crossing, cross_padding=crossing.cross_padding[:, 1:]).run()
    with pytest.raises(RuntimeError, match="keys must be"):
        replace(call, keys=[x[:, :, :11] for x in call.keys]).run()
    with pytest.raises(RuntimeError, match="start must be int32"):
        replace(call, start=torch.zeros(2)).run()
    own = call_of(Case(per_layer=24))
    with pytest.raises(ValueError, match="0 per_layer_inputs: must be 1"):
        replace(own, per_layer_inputs=[]).run()
    with pytest.raises(RuntimeError, match=r"per_layer_inputs must be \[2, 1, 24\]"):
        replace(own, per_layer_inputs=[own.per_layer_inputs[0][..., :23]]).run()
    with pytest.raises(RuntimeError, match="rows must be int32"):
        replace(call, rows=torch.zeros(2, 5, dtype=torch.int32)).run()


def wrong_mixtures() -> dict[str, DecoderLayer]:
    layer = layers_of(Case(experts="gated shared"))[0]
    mixture = layer.ffn
    assert isinstance(mixture, MixtureOfExperts)
    wrong = {
        "top_k=8": replace(mixture, top_k=8),
        "scoring='linear'": replace(mixture, scoring="linear"),
        "choice_bias of shape": replace(mixture, choice_bias=torch.zeros(3)),
        "shared_gate=True": replace(mixture, shared=None),
        "sub_norm of a shared expert": replace(
            mixture, shared=replace(mixture.shared, sub_norm=Norm("rms_norm", None, None, 1e-5))
        ),
        "router is 8 x 64": replace(mixture, shared_gate=False),
        "up has 448 output features": replace(mixture, experts=replace(mixture.experts, experts=6)),
    }
    return {message: replace(layer, ffn=part) for message, part in wrong.items()}


def wrong_gates(layer: DecoderLayer) -> dict[str, DecoderLayer]:
    gates = {
        "activation='tanh' of the gate": Gate(Heads(0, 32, 16), 16, "tanh"),
        "dim=2 of the gate": Gate(Heads(0, 32, 16), 2, "sigmoid"),
        "gate=Heads": Gate(Heads(100, 32, 16), 16, "sigmoid"),
        "gate=Heads.* head_stride=-1": Gate(Heads(0, 32, -1), 16, "sigmoid"),
    }
    return {
        message: replace(layer, attention=replace(layer.attention, gate=gate))
        for message, gate in gates.items()
    }


def test_parts_that_do_not_fit() -> None:
    layer = layers_of(Case())[0]
    attention, ffn = layer.attention, layer.ffn
    wrong = {
        "at least one layer": None,
        "gated FFN with 40": replace(
            layer, ffn=replace(ffn, down=Projection(pack_linear(torch.randn(64, 40), "float32"), None))
        ),
        "activation='swish'": replace(layer, ffn=replace(ffn, activation="swish")),
        "heads=3": replace(layer, attention=replace(attention, heads=3)),
        "head_stride is required": replace(layer, attention=replace(attention, query=Heads(0, 32))),
        "key=Heads": replace(layer, attention=replace(attention, key=Heads(100, 16))),
        **wrong_gates(layer),
        "window=0": replace(layer, attention=replace(attention, window=0)),
        "softcap=-1": replace(layer, attention=replace(attention, softcap=-1.0)),
        "rotary_dim=7": replace(layer, attention=replace(attention, rotary_dim=7)),
        "sinks of shape": replace(layer, attention=replace(attention, sinks=torch.zeros(3))),
        "relative of shape": replace(layer, attention=replace(attention, relative=torch.zeros(3, 8))),
        "output is": replace(layer, attention=replace(attention, output=ffn.down)),
        "weight of ffn_norm": replace(layer, ffn_norm=Norm("rms_norm", torch.ones(3), None, 1e-5)),
        "kind='group_norm'": replace(layer, ffn_norm=Norm("group_norm", None, None, 1e-5)),
        "an rms_norm with a bias": replace(layer, ffn_norm=Norm("rms_norm", None, torch.ones(64), 1e-5)),
        "weight of sub_norm": replace(
            layer, ffn=replace(ffn, sub_norm=Norm("rms_norm", torch.ones(3), None, 1e-5))
        ),
        "weight of value_norm": replace(
            layer, attention=replace(attention, value_norm=Norm("rms_norm", torch.ones(3), None, 1e-5))
        ),
        "output of per_layer is 64 x 96": replace(layer, per_layer=PerLayerInput(ffn.up, "silu", ffn.down)),
        "output_scale=0.5": replace(layer, output_scale=0.5, ffn_out_norm=layer.ffn_norm),
        "cross=None": replace(layer, cross_norm=layer.ffn_norm),
        **wrong_mixtures(),
        "ffn=None": replace(layer, ffn=None),
        "parallel=True": replace(layer, parallel=True, ffn_out_norm=layer.ffn_norm),
    }
    for message, part in wrong.items():
        with pytest.raises(ValueError, match=message):
            bind([] if part is None else [part])
