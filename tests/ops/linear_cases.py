"""Shapes of linear layers, and how far their results may be from the truth."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cpu_accel.ops.linear import ACTIVATIONS, INPUT_STEPS, linear
from hf_cpu_accel.packing.linear import PackedWeight, pack_linear, unpack_linear
from hf_cpu_accel.packing.rotation import rotate, rotate_back

# Largest error relative to the largest output. int8: half a quantization step of the input averages out over k. One bit less would
# not pass.
BOUND = {
    "float32": 3e-6,
    "bfloat16": 6e-3,
    "int8": 1e-2,
    "int8-weight": 5e-5,
    "int4": 1e-2,
    "affine8": 5e-5,
    "affine4": 5e-5,
}
# Of weights of convolutions, which have no affine groups.
CONVOLUTION_DTYPES = [dtype for dtype in BOUND if not dtype.startswith("affine")]
SHAPES = [
    (1, 1, 1),
    (1, 768, 96),
    (2, 37, 35),
    (4, 130, 66),
    (3, 7, 33),
    (13, 64, 32),
    (14, 65, 31),
    (15, 3, 1),
    (29, 130, 100),
    (60, 257, 65),
    (200, 9001, 70),  # k in parts
]


def check(
    m: int, k: int, n: int, dtype: str, activation: str = "none", residual: bool = False, seed: int = 0
) -> None:
    """One linear layer against float64 arithmetic on the very weights that were packed; raises AssertionError."""
    g = torch.Generator().manual_seed(seed)
    x, w = torch.randn(m, k, generator=g), torch.randn(n, k, generator=g) / k**0.5
    bias = torch.randn(n, generator=g)
    extra = torch.randn(m, n, generator=g) if residual else None
    packed = pack_linear(w, dtype)
    truth = ACTIVATIONS[activation](F.linear(x.double(), unpack_linear(packed).double(), bias.double()))
    if extra is not None:
        truth = truth + extra
    got = linear(x, packed, bias, activation=activation, residual=extra)
    assert got.shape == truth.shape
    assert got.dtype == x.dtype
    error = (got - truth).abs().max() / truth.abs().max().clamp_min(1.0)
    assert error <= BOUND[dtype], f"{dtype} {m}x{k}x{n} {activation}: error {error:.2e}"


def check_weight_as_it_is(m: int, k: int, n: int, seed: int = 0) -> None:
    """A float32 weight that is not packed gives what the packed one does; bit for bit where its panels are packed on the way."""
    g = torch.Generator().manual_seed(seed)
    x, w, bias = torch.randn(m, k, generator=g), torch.randn(n, k, generator=g), torch.randn(n, generator=g)
    as_it_is = PackedWeight(w, None, k, n, "float32")
    assert torch.equal(unpack_linear(as_it_is), w)
    assert torch.equal(unpack_linear(as_it_is.narrow(n // 32 * 32, n % 32)), w[n // 32 * 32 :])
    given = linear(x, as_it_is, bias, activation="relu", residual=bias.expand(m, n))
    expected = linear(x, pack_linear(w, "float32"), bias, activation="relu", residual=bias.expand(m, n))
    allowed = BOUND["float32"] * expected.abs().max().clamp_min(1.0) if m <= 16 else 0.0
    assert (given - expected).abs().max() <= allowed


def check_within_half_a_step(x: Tensor, weight: Tensor, dtype: str = "int8") -> None:
    """8-bit input against float64: each rotated value is off by at most half a step of its row's range, and 1 % for float32."""
    packed = pack_linear(weight, dtype)
    values = unpack_linear(packed).double()
    rotated = rotate(x)
    step = (rotated.amax(dim=1).clamp(min=0) - rotated.amin(dim=1).clamp(max=0)) / INPUT_STEPS
    truth = x.double() @ values.T
    limit = 0.51 * step[:, None].double() * rotate_back(values).abs().sum(dim=1)
    assert ((linear(x, packed) - truth).abs() <= limit + 1e-6 * truth.abs().max()).all()


def check_largest_products(dtype: str, k: int, n: int = 40) -> None:
    """Inputs at the ends of their range times weights of the largest magnitude, in all orders of signs that two neighbors have."""
    g = torch.Generator().manual_seed(k)
    ones = torch.ones(k)
    neighbors = ones.clone()
    neighbors[1::2] = -1
    alone = ones.clone()
    alone[k // 2] = -1
    pairs = ones.clone()
    pairs[2::4] = pairs[3::4] = -1
    signs = torch.stack([ones, -ones, neighbors, -neighbors, alone, -alone, pairs, -pairs])
    random = torch.randint(0, 2, (n, k), generator=g) * 2.0 - 1.0
    weights = torch.cat([signs, random])[:n]
    inputs = torch.cat([signs, signs.clamp(min=0), signs.clamp(max=0), random[:9]])
    for rows in (len(inputs), 1, 2, 3, 5):
        check_within_half_a_step(rotate_back(inputs[:rows]), rotate_back(weights), dtype)


def check_rounding_of_wide_input(m: int, k: int, n: int, seed: int) -> None:
    """int8-weight: each output, also a single one, is at most 5.5 deviations of its row's rounding to 16 bits off."""
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(m, k, generator=g), torch.randn(n, k, generator=g) / k**0.5
    packed = pack_linear(weight, "int8-weight")
    values = unpack_linear(packed).double()
    step = rotate(x).abs().amax(dim=1) / (2**15 - 1)
    deviation = step[:, None].double() / 12**0.5 * rotate_back(values).norm(dim=1)
    truth = x.double() @ values.T
    assert ((linear(x, packed) - truth).abs() <= 5.5 * deviation + 1e-6 * truth.abs().max()).all()
