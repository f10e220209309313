"""conv2d, and convolutions: chains of them with poolings."""

from __future__ import annotations

import random

import torch

from hf_cpu_accel.ops.chain.reference import chain_reference
from hf_cpu_accel.ops.convolution import conv2d_reference, out_size
from hf_cpu_accel.ops.convolution_chain import bind
from hf_cpu_accel.ops.linear import ACTIVATIONS
from hf_cpu_accel.packing.convolution import pack_conv2d, takes_tiles
from tests.ops.convolution.chain_cases import ALIKE, chain, gated, stem
from tests.ops.convolution.test_convolution import drawn
from tests.ops.fuzz import draw
from tests.ops.fuzz.call import Call
from tests.ops.fuzz.linear import before_activation
from tests.ops.linear_cases import BOUND, CONVOLUTION_DTYPES


def conv2d(rng: random.Random) -> Call:
    case, kind = drawn(rng), rng.choice(CONVOLUTION_DTYPES)
    image = case.image().to(draw.floats(rng))
    weight, windows = case.weight(), [list(case.kernel_size), *map(list, case.window.values())]
    tiled = takes_tiles(weight.shape, kind, case.stride, case.dilation) and rng.random() < 0.7
    packed = pack_conv2d(weight, kind, tiled=tiled)
    sides = zip((case.height, case.width), *windows, strict=True)
    shape = (case.batch, *(out_size(*side) for side in sides), case.out_channels)
    residual = torch.randn(shape) if rng.random() < 0.4 else None
    rows = draw.laid_out(rng, image.permute(0, 2, 3, 1))
    arguments = [rows, packed.data, packed.scale, draw.vector(rng, case.out_channels), residual]
    activation = rng.choice(list(ACTIVATIONS))
    arguments += [case.out_channels, *windows, activation]
    bound = max(2 * BOUND[kind], ALIKE.get(kind, 0.0) if tiled else 0.0) + draw.rounding(image)
    bound = before_activation(bound, activation)
    return Call(
        "conv2d", arguments, conv2d_reference, bound, notes=[f"{case}, {kind}, tiled={tiled}"], hides=tiled
    )


def convolutions(rng: random.Random) -> Call:
    kind = rng.choice(list(ALIKE))
    form = rng.randrange(3)
    if form == 0:
        channels = rng.choice((1, 3, 8, 16, 24, 40, 72, 200))
        steps = gated(rng, channels=channels, sides=(9, 9))
        image = torch.randn(rng.randint(1, 2), rng.randint(9, 30), rng.randint(9, 20), channels)
    elif form == 1:
        channels = rng.choice((32, 64))
        steps = chain(kind, rng, channels=channels, stride=rng.randint(1, 2))
        image = torch.randn(rng.randint(1, 2), rng.randint(1, 12), rng.randint(1, 12), channels)
    else:
        channels = rng.choice((1, 3, 4, 19))
        steps = stem(kind, rng, channels=channels, padding=rng.randint(0, 1))
        image = torch.randn(rng.randint(1, 2), rng.randint(7, 20), rng.randint(9, 20), channels)
    narrow = kind != "float32" and rng.random() < 0.5
    bound = bind(steps, narrow=narrow)
    arguments = [draw.laid_out(rng, image), bound.parts, bound.layout, narrow]
    return Call("convolutions", arguments, chain_reference, ALIKE[kind], notes=[kind], hides=True)


FAMILY = (conv2d, convolutions)
