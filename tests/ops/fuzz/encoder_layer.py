"""encoder_layer, with every option that a family of models has."""

from __future__ import annotations

import random

import torch

from hf_cpu_accel.ops.encoder_layer import EncoderInputs
from hf_cpu_accel.ops.encoder_layer_reference import encoder_layer_reference
from hf_cpu_accel.ops.linear import ACTIVATIONS
from tests.ops.encoder.call import masks_of, positions_of, weights_of
from tests.ops.encoder.cases import MASKS, PADDINGS, Case
from tests.ops.encoder.test_layer import BFLOAT16_ROUNDING, BOUNDS
from tests.ops.fuzz import draw
from tests.ops.fuzz.call import Call


def encoder_layer(rng: random.Random) -> Call:
    case = _case(rng)
    weights, (padding, mask), positions = weights_of(case), masks_of(case), positions_of(case)
    x = draw.laid_out(rng, torch.randn(case.batch, case.length, case.features).to(case.dtype))
    cos, sin = positions["rotary"] or (None, None)
    inputs = EncoderInputs(
        padding, mask, positions["relative"], cos, sin, case.window or 0, *(positions["positions"] or ())
    )
    bound = BOUNDS[case.weights] + draw.rounding(x)
    bound += BFLOAT16_ROUNDING if case.bf16_intermediates else 0.0
    bound *= (
        2 if case.weights == "int8" else 1
    )  # the tests' have 64 features, and steps average out less in fewer
    arguments = [x, *inputs, *weights.arguments(), positions["rows"]]
    return Call(
        "encoder_layer", arguments, encoder_layer_reference, bound, 1e-3, notes=[str(case)], hides=True
    )


def _case(rng: random.Random) -> Case:
    before, heads = rng.random() < 0.5, rng.randint(1, 4)
    weights = rng.choice(("float32", "float32", "bfloat16", "int8"))
    scattered = rng.choice((0, 0, 0, rng.randint(1, 20)))
    special = rng.choice(("plain", "positions", *(() if scattered else ("relative", "window"))))
    return Case(
        batch=rng.randint(1, 4),
        length=scattered * rng.randint(1, 4) if scattered else rng.choice((1, rng.randint(1, 70))),
        features=max(8, draw.size(rng, 100)),  # as encoder/test_layer.py, whose bounds these are
        heads=heads * 2,
        head_size=rng.choice((16, 32, 48)),
        intermediate=32 * rng.randint(1, 4),
        weights=weights,
        dtype=draw.floats(rng),
        pre_norm=before,
        activation=rng.choice(list(ACTIVATIONS)),
        mask=rng.choice(("none", "windows", "window") if scattered else ("none", *PADDINGS, *MASKS)),
        qkv_order=tuple(rng.sample(range(3), 3)),
        biases=rng.random() < 0.7,
        bf16_intermediates=weights != "float32" and rng.random() < 0.5,
        norm=rng.choice(("layer_norm", "rms_norm", "none") if before else ("layer_norm", "rms_norm")),
        gated=rng.random() < 0.5,
        layer_scale=before and rng.random() < 0.3,
        relative=rng.randint(1, 40) if special == "relative" else 0,
        positions=rng.choice(("keys", "queries", "keys and queries")) if special == "positions" else "",
        rotary=rng.choice((0, 2, 12, 16)) if not scattered else 0,
        window=rng.randint(1, 30) if special == "window" else None,
        scattered=scattered,
    )


FAMILY = (encoder_layer,)
