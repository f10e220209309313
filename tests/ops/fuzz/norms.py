"""The norms, embedding_norm, rotary_embedding and snake."""

from __future__ import annotations

import random
from typing import Any

import torch

from hf_cpu_accel.ops import norm as norms
from hf_cpu_accel.ops.embedding import embedding_norm_reference
from hf_cpu_accel.ops.group_norm import group_norm_reference
from hf_cpu_accel.ops.rope import rotary_embedding_reference
from hf_cpu_accel.ops.snake import snake_reference
from tests.ops.fuzz import draw
from tests.ops.fuzz.call import Call
from tests.ops.test_embedding import BOUNDS as EMBEDDING_BOUNDS
from tests.ops.test_embedding import arguments as embedding_arguments
from tests.ops.test_group_norm import layouts
from tests.ops.test_norm import FLOAT32_BOUND
from tests.ops.test_rope import inputs as rotary_inputs
from tests.ops.test_snake import BOUND as SNAKE_BOUND
from tests.ops.test_snake import inputs as snake_inputs


def norm(rng: random.Random) -> Call:
    op = rng.choice(("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"))
    x = draw.rows(rng, draw.size(rng, 400))
    vectors = [draw.vector(rng, x.shape[-1]) for _ in range(1 + op.endswith("layer_norm"))]
    residual = [draw.laid_out(rng, torch.randn(x.shape).to(draw.floats(rng)))] if op.startswith("add") else []
    arguments: list[Any] = [x, *residual, *vectors, 1e-5]
    return Call(op, arguments, getattr(norms, f"{op}_reference"), FLOAT32_BOUND + draw.rounding(x), 0.1)


def group_norm(rng: random.Random) -> Call:
    groups, pixels = rng.randint(1, 9), [rng.randint(1, 9) for _ in range(rng.randint(0, 3))]
    channels = groups * rng.randint(1, 8)
    x = (torch.randn(rng.randint(0, 3), channels, *pixels) * 2 + 1).to(draw.floats(rng))
    x = rng.choice(list(layouts(x).values()))
    vectors = [draw.vector(rng, channels) for _ in range(2)]
    arguments = [x, groups, *vectors, 1e-5, rng.choice(("none", "silu"))]
    # Bound of test_group_norm.py.
    return Call("group_norm", arguments, group_norm_reference, 2e-5 + draw.rounding(x))


def embedding_norm(rng: random.Random) -> Call:
    dtype, positions = draw.floats(rng), rng.choice(("counted", "padded", "given"))
    sizes = (rng.randint(0, 4), rng.randint(0, 40), 7 + draw.size(rng, 200))
    tables, seed = rng.randint(1, 3), rng.randrange(10_000)
    arguments = list(embedding_arguments(*sizes, dtype, tables=tables, positions=positions, seed=seed))
    if rng.random() < 0.3:
        arguments[0] = arguments[0].int()  # type: ignore[attr-defined]
    bound = EMBEDDING_BOUNDS[dtype]
    return Call("embedding_norm", [*arguments, 1e-12], embedding_norm_reference, bound, 0.1)


def rotary_embedding(rng: random.Random) -> Call:
    sizes = (rng.randint(0, 3), rng.randint(0, 40), rng.randint(1, 5), 2 * draw.size(rng, 70))
    dtypes = (draw.floats(rng), draw.floats(rng))
    x, cos, sin = rotary_inputs(*sizes, *dtypes, rng.randrange(10_000))
    # test_rope.py: 1e-5, and the rounding of the result.
    arguments = [draw.laid_out(rng, x), cos, sin, rng.random() < 0.5]
    return Call("rotary_embedding", arguments, rotary_embedding_reference, 2e-5 + draw.rounding(x))


def snake(rng: random.Random) -> Call:
    sizes = (rng.randint(0, 3), draw.size(rng, 70), draw.size(rng, 90))
    channels_last = rng.random() < 0.5
    x, *numbers = snake_inputs(
        *sizes, draw.floats(rng), channels_last=channels_last, seed=rng.randrange(10_000)
    )
    arguments = [draw.laid_out(rng, x), *numbers, channels_last]
    return Call("snake", arguments, snake_reference, SNAKE_BOUND + draw.rounding(x))


FAMILY = (norm, norm, group_norm, embedding_norm, rotary_embedding, snake)
