"""encoder_layer against its plain-torch reference, over shapes, layouts, padding, masks, dtypes and thread counts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_cpu_accel import extension
from hf_cpu_accel.ops.encoder_layer import EncoderWeights, NormWeights, _reference, encoder_layer
from hf_cpu_accel.packing import pack_linear

# Largest difference over the largest value of the reference. int8: values near the middle between two steps may be rounded to
# either side, and one step of an input that ends up in 7 bits is 1/125 of its row's range.
# Narrow values between the steps are rounded to bfloat16, which may move int8 ones to the next step.
BOUNDS = {"float32": 1e-5, "bfloat16": 1e-2, "int8": 2e-2, "int8, 7 bits": 1e-1}
BFLOAT16_ROUNDING = 2.0**-8


@dataclass(frozen=True)
class Case:
    batch: int = 2
    length: int = 19
    features: int = 64
    heads: int = 4
    head_size: int = 16
    intermediate: int = 96
    weights: str = "float32"
    dtype: torch.dtype = torch.float32
    norm_before: bool = False
    activation: str = "gelu"
    mask: str = "none"
    order: tuple[int, int, int] = (0, 1, 2)
    biases: bool = True
    narrow: bool = False
    norm: str = "layer_norm"
    gated: bool = False
    gains: bool = False
    relative: int = 0  # tokens before and after, that have a bias of their own
    rotary: int = 0  # features of a head
    window: int | None = None

    def __str__(self) -> str:
        sizes = (
            f"{self.batch}x{self.length}x{self.features}-{self.heads}x{self.head_size}-{self.intermediate}"
        )
        when = "before" if self.norm_before else "after"
        what = f"{self.weights}{'-narrow' * self.narrow}-{str(self.dtype)[6:]}-{when}-{self.mask}-{self.norm}"
        more = f"{'-gated' * self.gated}{'-gains' * self.gains}"
        return f"{sizes}-{what}{more}-{self.relative}-{self.rotary}-{self.window}"


PADDINGS = ["right padding", "left padding", "holes", "one sequence empty", "all empty"]
MASKS = ["bool keys", "bool per query", "float per head", "bfloat16 keys"]
CASES = [
    Case(),
    Case(batch=1, length=1),
    Case(batch=1, length=1, mask="right padding"),
    Case(
        batch=3, length=33, features=47, heads=1, head_size=32, intermediate=33
    ),  # ragged in every dimension but the heads'
    Case(
        batch=2, length=130, features=96, heads=2, head_size=32, activation="gelu_tanh"
    ),  # many tokens per thread
    Case(batch=16, length=40, mask="right padding"),
    Case(order=(2, 0, 1), norm_before=True, activation="relu"),
    Case(biases=False, activation="silu"),
    *(Case(mask=mask, norm_before=before) for mask in PADDINGS for before in (False, True)),
    *(Case(mask=mask) for mask in MASKS),
    *(
        Case(
            batch=3,
            length=length,
            weights=weights,
            dtype=dtype,
            mask="right padding",
            norm_before=before,
            narrow=narrow,
        )
        for weights in ("bfloat16", "int8")
        for narrow in (False, True)
        for dtype in (torch.float32, torch.bfloat16)
        for length in (9, 70)
        for before in (False, True)
    ),
    Case(dtype=torch.bfloat16),
    # T5: RMS norms, gated or not, a bias for distances that is longer or shorter than the text.
    *(
        Case(
            length=length,
            norm="rms_norm",
            norm_before=True,
            biases=False,
            gated=gated,
            activation="gelu_tanh" if gated else "relu",
            relative=relative,
            mask=mask,
            weights=weights,
            narrow=weights != "float32",
        )
        for length, relative, mask in (
            (19, 5, "right padding"),
            (70, 100, "holes"),
            (300, 20, "left padding"),
        )
        for gated, weights in ((False, "float32"), (True, "float32"), (True, "bfloat16"), (True, "int8"))
    ),
    # ModernBERT, Nomic: positions that are turned, windows, layers without a first norm.
    *(
        Case(
            batch=3,
            length=length,
            norm_before=norm != "after",
            norm="none" if norm == "none" else "layer_norm",
            gated=True,
            rotary=rotary,
            window=window,
            mask=mask,
            dtype=dtype,
            narrow=window == 4,
            weights="int8" if window == 4 else "float32",
        )
        for length, rotary, window, norm, mask, dtype in (
            (9, 16, None, "after", "right padding", torch.float32),
            (33, 12, 4, "none", "left padding", torch.bfloat16),
            (300, 16, 64, "before", "right padding", torch.float32),
            (300, 16, 64, "before", "float per head", torch.float32),
            (40, 2, 1, "before", "holes", torch.bfloat16),
        )
    ),
    # DINOv2, BEiT: gains; what is attended to besides the padding.
    *(
        Case(gains=True, norm_before=True, dtype=dtype, mask=mask)
        for dtype in (torch.float32, torch.bfloat16)
        for mask in (
            "none",
            "right padding",
            "float per head, padded",
            "bool per query, holes",
            "bfloat16 keys, holes",
        )
    ),
    Case(batch=16, length=40, gains=True, norm_before=True, gated=True, rotary=16),
    # Attention in integers: more keys than one block of them, ragged sizes, masks, queries in several blocks.
    *(
        Case(
            batch=1,
            length=length,
            heads=2,
            head_size=head_size,
            weights="int8",
            narrow=True,
            mask=mask,
        )
        for length, head_size, mask in (
            (300, 48, "none"),
            (33, 80, "holes"),
            (270, 16, "float per head"),
            (45, 128, "bool per query"),
            (3, 272, "none"),
        )
    ),
]


def weights_of(case: Case) -> EncoderWeights:
    inner = case.heads * case.head_size

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns) / columns**0.5

    def vector(size: int) -> Tensor | None:
        return (0.1 * torch.randn(size)).to(case.dtype) if case.biases else None

    def norm(eps: float, kind: Any) -> NormWeights:
        if not case.biases and kind == "layer_norm":
            return NormWeights(None, None, eps)
        weight = (1 + 0.1 * torch.randn(case.features)).to(case.dtype)
        return NormWeights(weight, vector(case.features) if kind == "layer_norm" else None, eps, kind)

    up = 2 * case.intermediate if case.gated else case.intermediate
    last = "rms_norm" if case.norm == "rms_norm" else "layer_norm"

    return EncoderWeights(
        qkv=pack_linear(matrix(3 * inner, case.features), case.weights),
        qkv_bias=vector(3 * inner),
        order=case.order,
        head_size=case.head_size,
        attention_scale=None if case.biases else 0.3,
        output=pack_linear(matrix(case.features, inner), case.weights),
        output_bias=vector(case.features),
        attention_norm=None if case.norm == "none" else norm(1e-12, case.norm),
        up=pack_linear(matrix(up, case.features), case.weights),
        up_bias=vector(up),
        down=pack_linear(matrix(case.features, case.intermediate), case.weights),
        down_bias=vector(case.features),
        activation=case.activation,
        ffn_norm=norm(1e-5, last),
        norm_before=case.norm_before,
        narrow=case.narrow,
        gated=case.gated,
        attention_gain=torch.randn(case.features).to(case.dtype) if case.gains else None,
        ffn_gain=torch.randn(case.features).to(case.dtype) if case.gains else None,
    )


def positions_of(case: Case) -> dict[str, Any]:
    """relative, rotary and window."""
    relative = torch.randn(case.heads, 2 * case.relative + 1) if case.relative else None
    angles = torch.randn(1 if case.batch % 2 else case.batch, case.length, case.rotary // 2).repeat(1, 1, 2)
    tables = (angles.cos().to(case.dtype), angles.sin().to(case.dtype)) if case.rotary else None
    return {"relative": relative, "rotary": tables, "window": case.window}


def reference(
    hidden_states: Tensor,
    weights: EncoderWeights,
    padding: Tensor | None = None,
    mask: Tensor | None = None,
    relative: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    window: int | None = None,
) -> Tensor:
    cos, sin = rotary or (None, None)
    return _reference(hidden_states, padding, mask, relative, cos, sin, window or 0, *weights.arguments())


def masks_of(case: Case) -> tuple[Tensor | None, Tensor | None]:
    """padding and mask."""
    batch, length = case.batch, case.length
    position, lengths = torch.arange(length), torch.randint(1, length + 1, (batch, 1))
    if case.mask == "float per head, padded":
        return position < lengths, torch.randn(1, case.heads, length, length)
    if case.mask == "bool per query, holes":
        return torch.rand(batch, length) < 0.6, torch.rand(batch, 1, length, length) < 0.7
    if case.mask == "bfloat16 keys, holes":
        return torch.rand(batch, length) < 0.6, torch.randn(batch, case.heads, 1, length).bfloat16()
    if case.mask == "right padding":
        return position < lengths, None
    if case.mask == "left padding":
        return position >= length - lengths, None
    if case.mask == "holes":
        return torch.rand(batch, length) < 0.6, None
    if case.mask == "one sequence empty":
        padding = position < lengths
        padding[-1] = False
        return padding, None
    if case.mask == "all empty":
        return torch.zeros(batch, length, dtype=torch.bool), None
    if case.mask == "bool keys":
        return None, (position < lengths)[:, None, None]
    if case.mask == "bool per query":
        return None, torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    if case.mask == "float per head":
        return None, torch.randn(1, case.heads, length, length)
    if case.mask == "bfloat16 keys":
        return None, torch.randn(batch, 1, 1, length).bfloat16()
    return None, None


def check(case: Case, hidden_states: Tensor | None = None) -> None:
    weights, (padding, mask), positions = weights_of(case), masks_of(case), positions_of(case)
    if hidden_states is None:
        hidden_states = torch.randn(case.batch, case.length, case.features).to(case.dtype)
    expected = reference(hidden_states, weights, padding, mask, **positions).double()
    seven_bits = case.weights == "int8" and extension.status().tier in ("avx2", "avx512")
    bound = BOUNDS["int8, 7 bits" if seven_bits else case.weights]
    bound += BFLOAT16_ROUNDING if case.narrow else 0.0
    bound += BFLOAT16_ROUNDING if case.dtype is torch.bfloat16 else 0.0
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(encoder_layer(hidden_states, weights, padding=padding, mask=mask, **positions))
    finally:
        torch.set_num_threads(threads)
    for result in results:
        assert result.dtype is case.dtype
        assert result.is_contiguous()
        error = (result.double() - expected).abs().amax() / expected.abs().amax().clamp(min=1e-3)
        assert error <= bound, f"{case}: {error:.2e} > {bound:.2e}"
        # Which tokens share a tile may depend on the threads, and with it the order of sums on some tiers; no more than that.
        apart = (result.double() - results[0].double()).abs().amax() / expected.abs().amax().clamp(min=1e-3)
        assert apart <= bound / 2, f"{case}: {apart:.2e} between numbers of threads"


def check_encoder_layer(seed: int) -> None:
    """All cases; for the tiers, each in a process of its own."""
    torch.manual_seed(seed)
    for case in CASES:
        check(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case: Case) -> None:
    torch.manual_seed(0)
    check(case)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.builds(
        Case,
        batch=st.integers(1, 5),
        length=st.integers(1, 60),
        features=st.integers(8, 80),
        heads=st.integers(1, 3),
        head_size=st.sampled_from([32, 64]),
        intermediate=st.integers(1, 140),
        weights=st.sampled_from(["float32", "bfloat16"]),
        norm_before=st.booleans(),
        activation=st.sampled_from(["none", "gelu", "quick_gelu", "tanh"]),
        mask=st.sampled_from(["none", *PADDINGS, *MASKS]),
        norm=st.sampled_from(["layer_norm", "rms_norm"]),
        relative=st.sampled_from([0, 0, 3, 40]),
        rotary=st.sampled_from([0, 0, 32]),
    )
)
def test_random_shapes(case: Case) -> None:
    torch.manual_seed(1)
    check(case)


def test_not_contiguous() -> None:
    torch.manual_seed(0)
    case = Case()
    wide = torch.randn(case.batch, case.length, 2, case.features)
    check(case, wide[:, :, 1])
    check(case, torch.randn(case.length, case.batch, case.features).transpose(0, 1))


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_padding_changes_no_token(weights: str) -> None:
    """A sequence gives the same alone and in a padded batch, whatever stands in the padding."""
    torch.manual_seed(0)
    case = Case(batch=3, length=40, weights=weights)
    layer = weights_of(case)
    lengths = torch.tensor([40, 7, 23])
    padding = torch.arange(case.length) < lengths[:, None]
    hidden_states = torch.randn(case.batch, case.length, case.features)
    hidden_states[~padding] = torch.nan
    together = encoder_layer(hidden_states, layer, padding=padding)
    assert (together[~padding] == 0).all()
    for row, length in enumerate(lengths.tolist()):
        alone = encoder_layer(hidden_states[row : row + 1, :length], layer)
        torch.testing.assert_close(together[row, :length], alone[0], rtol=0, atol=1e-5)


def test_many_small_probabilities_count() -> None:
    """One key gets two thirds of the attention, 500 others a thousandth of that each: in 8 bits they would be zeros."""
    torch.manual_seed(0)
    features, length = 64, 501
    key = torch.zeros(features, features)
    key[0, 0] = 1.0  # the first feature, which is large in the first token only
    query_bias = torch.zeros(3 * features)
    query_bias[0] = 6.9
    hidden_states = 0.5 * torch.randn(1, length, features) + torch.linspace(-1, 1, features)
    hidden_states[..., 0] = 0.0
    hidden_states[0, 0] = torch.eye(features)[0] * 30
    norm = NormWeights(None, None, 1e-5)
    weights = EncoderWeights(
        qkv=pack_linear(torch.cat([torch.zeros(features, features), key, torch.eye(features)]), "int8"),
        qkv_bias=query_bias,
        order=(0, 1, 2),
        head_size=features,
        attention_scale=1 / 7.9,  # the first token's key is about 7.9 after the norm
        output=pack_linear(torch.eye(features), "int8"),
        output_bias=None,
        attention_norm=norm,
        up=pack_linear(torch.zeros(features, features), "int8"),
        up_bias=None,
        down=pack_linear(torch.zeros(features, features), "int8"),
        down_bias=None,
        activation="none",
        ffn_norm=norm,
        norm_before=True,
        narrow=True,
    )
    attended = encoder_layer(hidden_states, weights) - hidden_states
    expected = reference(hidden_states, weights) - hidden_states
    assert 4.0 < expected[0, 1, 0] < 6.5  # of 7.9: the share of the first token
    others = slice(1, features)
    assert (attended - expected)[..., others].abs().max() <= 0.1 * expected[..., others].abs().max()


def test_traces() -> None:
    torch.manual_seed(0)
    case = replace(Case(), mask="right padding")
    weights, (padding, _) = weights_of(case), masks_of(case)
    hidden_states = torch.randn(case.batch, case.length, case.features)
    tables = (None, None, None, 0)
    torch.library.opcheck(
        torch.ops.hf_cpu_accel.encoder_layer.default,
        (hidden_states, padding, None, *tables, *weights.arguments()),
    )
    gated = replace(Case(), norm="rms_norm", norm_before=True, gated=True, gains=True, rotary=16, relative=3)
    positions = positions_of(gated)
    inputs = (hidden_states, padding, None, positions["relative"], *positions["rotary"], 0)
    torch.library.opcheck(
        torch.ops.hf_cpu_accel.encoder_layer.default, (*inputs, *weights_of(gated).arguments())
    )


def test_bad_arguments() -> None:
    weights = weights_of(Case())
    hidden_states = torch.randn(2, 5, 64)
    with pytest.raises(ValueError, match="last dimension must be 64"):
        encoder_layer(torch.randn(2, 5, 63), weights)
    with pytest.raises(ValueError, match=r"must be \[batch, length, features\]"):
        encoder_layer(torch.randn(5, 64), weights)
    padding = torch.ones(2, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"padding of shape \(2, 4\)"):
        encoder_layer(hidden_states, weights, padding=padding[:, :4])
    with pytest.raises(RuntimeError, match="an odd number"):
        encoder_layer(hidden_states, weights, relative=torch.randn(4, 6))
    with pytest.raises(RuntimeError, match="excludes a window"):
        encoder_layer(hidden_states, weights, window=2, relative=torch.randn(4, 7))
    with pytest.raises(RuntimeError, match="cos and sin must be"):
        encoder_layer(hidden_states, weights, rotary=(torch.ones(1, 5, 18), torch.ones(1, 5, 18)))
    with pytest.raises(RuntimeError, match="gains go with norms that come before"):
        encoder_layer(hidden_states, replace(weights, ffn_gain=torch.ones(64)))
    with pytest.raises(RuntimeError, match="may be missing"):
        encoder_layer(hidden_states, replace(weights, attention_norm=None))
    with pytest.raises(RuntimeError, match="does not fit"):
        encoder_layer(hidden_states, replace(weights, gated=True))
    with pytest.raises(ValueError, match="activation='swish'"):
        encoder_layer(hidden_states, replace(weights, activation="swish"))
    with pytest.raises(RuntimeError, match="permutation"):
        encoder_layer(hidden_states, replace(weights, order=(0, 0, 1)))
    with pytest.raises(RuntimeError, match="multiple of head_size"):
        encoder_layer(hidden_states, replace(weights, head_size=5))
    with pytest.raises(RuntimeError, match="does not fit"):
        encoder_layer(hidden_states, replace(weights, down=weights.up))


def test_threads_that_torch_does_not_run_together() -> None:
    """Then one thread does all, and nobody waits for a thread that does not come."""
    torch.manual_seed(0)
    weights, hidden_states = weights_of(Case()), torch.randn(2, 19, 64)
    expected = encoder_layer(hidden_states, weights)
    try:
        torch.ops.hf_cpu_accel.run_together(False)
        assert torch.equal(encoder_layer(hidden_states, weights), expected)
    finally:
        torch.ops.hf_cpu_accel.run_together(True)


def test_several_callers_at_once() -> None:
    """Every caller has a team of its own."""
    torch.manual_seed(0)
    weights, hidden_states = weights_of(Case(length=70)), torch.randn(2, 70, 64)
    expected = encoder_layer(hidden_states, weights)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: encoder_layer(hidden_states, weights), range(40)))
    assert all(torch.equal(result, expected) for result in results)
