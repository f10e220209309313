"""decoder_layers, with every option that a family of models has; and the caches that it writes."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor

from hf_cpu_accel.ops.decoder.reference import decoder_layers_reference
from tests.ops.decoder.bounds import bound_of, close
from tests.ops.decoder.call import Call as LayersCall
from tests.ops.decoder.call import call_of
from tests.ops.decoder.cases import CROSSES, EXPERTS, GATES, HEAD_NORMS, MASKS, NORMS, VALUE_NORMS, Case
from tests.ops.decoder.recurrences import OPS, Sizes, recurrent_call
from tests.ops.fuzz import draw
from tests.ops.fuzz.call import Call

KEYS, VALUES = 5, 6  # places of the arguments that are written to


def decoder_layers(rng: random.Random) -> Call:
    case = _case(rng)
    return _call(case, call_of(case), str(case))


def layers_with_recurrences(rng: random.Random) -> Call:
    """Around layers that attend, which have neither rows, padding nor an encoder then."""
    key_heads, norm_groups, channels = rng.randint(1, 3), rng.randint(1, 3), draw.size(rng)
    sizes = Sizes(
        taps=rng.choice((4, 3, rng.randint(1, 6))),
        channels=channels,
        heads=key_heads * norm_groups * rng.randint(1, 2),
        key_heads=key_heads,
        key_dim=draw.size(rng, 70),
        value_dim=draw.size(rng, 70),
        norm_groups=norm_groups,
        gate_first=rng.random() < 0.5,
        normed=rng.random() < 0.7,
    )
    case = replace(_case(rng), start=False, rows=False, cross="none")
    op, states = rng.choice(OPS), draw.floats(rng)
    return _call(case, recurrent_call(op, case, sizes, states), f"{op}, {states} states, {sizes}, {case}")


def _call(case: Case, given: LayersCall, note: str) -> Call:
    # The bounds are those of two layers of the widths in test_decoder_layers.py. In narrower ones the roundings of rows and
    # weights, one of which may send a value to the next step, average out less, and in three layers they add up more.
    plain = case.weights == "float32" and case.dtype is case.cache is torch.float32
    bound = bound_of(case) * (1 if plain else 3)
    arguments = list(given.flat(given.keys, given.values))
    arguments[8] = list(arguments[8])  # type: ignore[call-overload]

    def alike(got: list[Tensor], expected: list[Tensor]) -> None:
        finite = expected[0].isfinite()  # elsewhere the reference has multiplied what is hidden by 0
        close(got[0][finite], expected[0][finite], bound, "hidden states")

    return Call(
        "decoder_layers",
        arguments,
        decoder_layers_reference,
        bound,
        alike=alike,
        written=(KEYS, VALUES),
        notes=[note],
        opaque=case.experts != "none",  # rounding may send a token to another expert
    )


def _case(rng: random.Random) -> Case:
    features = rng.choice((draw.size(rng, 100), 64))
    kv_heads, past = rng.randint(1, 3), rng.choice((0, rng.randint(0, 60), rng.randint(0, 300)))
    head_dim, cross = rng.choice((16, 17, 64)), rng.choice(("none", "none", *CROSSES))
    weights, layers = (
        rng.choice(("float32", "float32", "bfloat16", "int8", "int8-weight", "int4")),
        rng.randint(1, 3),
    )
    return Case(
        batch=rng.randint(1, 4),
        q_len=rng.choice((1, 1, 2, rng.randint(1, 30))),
        past=past,
        features=features,
        heads=kv_heads * rng.randint(1, 5),
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=rng.choice((16, 33, 64)),
        intermediate=rng.choice((32, 96)),
        layers=layers,
        weights=weights,
        dtype=draw.floats(rng),
        cache=rng.choice((torch.float32, torch.bfloat16, torch.int8)),
        norm=rng.choice(("rms_norm", "layer_norm")),
        norms=rng.choice(NORMS),
        head_norm=rng.choice(HEAD_NORMS),
        interleaved_heads=rng.random() < 0.3,
        biases=rng.random() < 0.5,
        gated=rng.random() < 0.7,
        parallel=cross == "none" and rng.random() < 0.3,
        residual_scale=rng.choice((1.0, 0.3)),
        window=rng.choice((None, None, 1, rng.randint(1, 30))),
        forget=layers > 1 and rng.random() < 0.3,
        softcap=rng.choice((None, None, 5.0)),
        sinks=rng.random() < 0.3,
        alibi=rng.random() < 0.3,
        relative=rng.choice((0, 0, 1, 30)),
        rotary_dim=rng.choice((0, 10, 16)),
        rotary_interleaved=rng.random() < 0.3,
        half_tables=rng.random() < 0.3,
        start=rng.random() < 0.3,
        rows=rng.random() < 0.3,
        mask=rng.choice(MASKS),
        cross=cross,
        experts=rng.choice(EXPERTS) if features % 32 == 0 else "none",
        gate=rng.choice(("none", "none", *GATES)),
        sub_norm=rng.choice(("none", "none", *HEAD_NORMS)),
        ffn=rng.random() < 0.8,
        value_norm=rng.choice(("none", *VALUE_NORMS)),
        shares_keys=rng.random() < 0.3,
        per_layer=rng.choice((0, 0, 32, rng.randint(16, 70))),
        output_scale=rng.choice((1.0, 1.0, 0.4)),
    )


FAMILY = (decoder_layers, layers_with_recurrences)
