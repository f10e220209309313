"""ffn, gated_ffn and experts_ffn."""

from __future__ import annotations

import random

import torch

from hf_cpu_accel.ops.experts import experts_reference
from hf_cpu_accel.ops.ffn import ffn_reference, gated_ffn_reference
from hf_cpu_accel.ops.linear import ACTIVATIONS
from hf_cpu_accel.packing.linear import pack_linear
from tests.ops.fuzz import draw
from tests.ops.fuzz.call import Call
from tests.ops.linear_cases import BOUND
from tests.ops.test_experts import BOUNDS, choice_of, experts_of, flat


def ffn(rng: random.Random) -> Call:
    gated = rng.random() < 0.5
    inner, out_features = 32 * rng.randint(1, 5) if gated else draw.size(rng, 200), draw.size(rng)
    x, kind = draw.rows(rng, draw.size(rng)), rng.choice(list(BOUND))
    up = pack_linear(torch.randn((1 + gated) * inner, x.shape[-1]) / x.shape[-1] ** 0.5, kind)
    down = pack_linear(torch.randn(out_features, inner) / inner**0.5, kind)
    residual = torch.randn(*x.shape[:-1], out_features) if rng.random() < 0.4 else None
    up_bias, down_bias = draw.vector(rng, (1 + gated) * inner), draw.vector(rng, out_features)
    weights = [up.data, up.scale, up_bias, down.data, down.scale, down_bias, residual]
    arguments = [x, *weights, inner, out_features, rng.choice(list(ACTIVATIONS))]
    # A value between two steps may be rounded to either, in both layers: see BOUNDS of test_experts.py, an FFN's.
    bound = BOUNDS[kind] + draw.rounding(x)
    if gated:
        return Call("gated_ffn", [*arguments, rng.random() < 0.5], gated_ffn_reference, bound)
    return Call("ffn", arguments, ffn_reference, bound)


def experts_ffn(rng: random.Random) -> Call:
    count, kind, gated = rng.randint(1, 9), rng.choice(list(BOUNDS)), rng.random() < 0.7
    experts = experts_of(
        count,
        32 * rng.randint(1, 4),
        32 * rng.randint(1, 4),
        kind,
        rng.choice(list(ACTIVATIONS)),
        gated,
        rng.random() < 0.5,
        0.7 * (gated and rng.random() < 0.3),
    )
    tokens = rng.choice((0, 1, 2, rng.randint(1, 70)))
    index, weights = choice_of(tokens, count, rng.randint(1, min(5, count)))
    x = draw.laid_out(rng, torch.randn(tokens, experts.features).to(draw.floats(rng)))
    bound = BOUNDS[kind] + draw.rounding(x)
    return Call("experts_ffn", list(flat(x, index, weights, experts)), experts_reference, bound, 1e-3)


FAMILY = (ffn, ffn, experts_ffn)
