"""ALiBi: slopes that are matched from scores, and biases with or without them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.check import row_error
from hf_cpu_accel.generate.cache import CPUCache
from hf_cpu_accel.rewrite.decoder.masks import convert_mask, form_of
from hf_cpu_accel.rewrite.decoder.scores import Slopes, read_scores
from hf_cpu_accel.rewrite.decoder.trace import AttentionCall
from tests.rewrite.decoder.decoder_families import DECODERS, LAYERS, Decoder, padded

SLOPES = torch.tensor([0.5, 0.3, 0.004])
LOWEST = torch.finfo(torch.float32).min
WITH_SLOPES = ["bloom", "mpt", "falcon-rw"]


def attention(kv_heads: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key [2, heads, 5, 16], and their products."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, 5, 16, generator=generator) for heads in (3, kv_heads))
    return query, key, query @ key.repeat_interleave(3 // kv_heads, dim=1).mT


@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("scale", [0.25, 0.1])
@pytest.mark.parametrize("slopes", [None, SLOPES])
def test_scale_and_slopes_are_read_off_scores(scale: float, slopes: Tensor | None, kv_heads: int) -> None:
    query, key, products = attention(kv_heads)
    scores = products * scale
    if slopes is not None:
        scores = scores + slopes[:, None, None] * (torch.arange(5) - 7)
    read = read_scores(AttentionCall(query, None, scores=scores), key, torch.float32, [])
    assert read is not None
    assert read.scale == (0.25 if scale == 0.25 else pytest.approx(scale, rel=1e-5))
    assert (read.slopes is None) == (slopes is None)
    if slopes is not None:
        assert torch.allclose(read.slopes, slopes, atol=1e-5)


@pytest.mark.parametrize("change", ["softcap", "curved", "hidden"])
def test_other_scores_are_not_read(change: str) -> None:
    query, key, products = attention()
    scores = {
        "softcap": 2 * (products / 8).tanh(),
        "curved": products / 4 + SLOPES[:, None, None] * torch.arange(5).square(),
        "hidden": (products / 4).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf),
    }[change]
    assert read_scores(AttentionCall(query, None, scores=scores), key, torch.float32, []) is None


def visible(length: int, window: int) -> Tensor:
    """bool [length, length], True where a query sees a key."""
    seen = torch.ones(length, length).tril().bool()
    return seen & ~seen.tril(-window)


@pytest.mark.parametrize("window", [3, 8, 40])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_what_a_layer_hides_is_read_off_its_buffer(window: int, dtype: torch.dtype) -> None:
    query, key, products = attention()
    hidden = (products / 4).masked_fill(~visible(5, window), LOWEST)
    call, table = AttentionCall(query, None, scores=hidden), visible(40, window)
    read = read_scores(call, key, torch.float32, [torch.ones(2), table[None, None].to(dtype)])
    assert read is not None
    assert read.hides
    assert read.scale == 0.25
    assert read.window == (window if window < 40 else None)
    others = [table[:4, :4], ~table, visible(40, 2), table.float(), table & (torch.rand(40, 40) < 0.9)]
    for other in others:
        assert read_scores(call, key, torch.float32, [other]) is None
    one_head = hidden.clone()
    one_head[:, 1, 0, 1] = 0.3
    assert read_scores(AttentionCall(query, None, scores=one_head), key, torch.float32, [table]) is None


def keys_bias(start: tuple[int, ...], kv_len: int, dtype: torch.dtype) -> Tensor:
    """[B * heads, 1, kv_len] as BLOOM makes it of a mask with padding on the left."""
    position = (torch.arange(kv_len) - torch.tensor(start)[:, None]).clamp_min(0)
    return (SLOPES[:, None] * position[:, None]).reshape(-1, 1, kv_len).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_len", [1, 7, 1500])
def test_biases_of_these_slopes_are_told_from_others(dtype: torch.dtype, kv_len: int) -> None:
    start = (min(3, kv_len - 1), 0)
    tokens = torch.arange(kv_len) >= torch.tensor(start)[:, None]
    found = Slopes("alibi", SLOPES, 1.0)
    bias = keys_bias(start, kv_len, dtype)
    assert found.says(bias, tokens, 2, kv_len)
    assert Slopes("alibi", SLOPES / 4, 0.25).says(bias.clone(), tokens, 2, kv_len)
    shared = (SLOPES[:, None, None] * torch.arange(1 - 2000, 1)).to(dtype)
    assert dtype is torch.bfloat16 or found.says(
        shared, tokens, 2, kv_len
    )  # far from 0 bfloat16 is too coarse
    assert not found.says(bias[:3], tokens, 2, kv_len + 1)
    assert not found.says(bias[:4], tokens, 2, kv_len)
    assert not found.says(None, tokens, 2, kv_len)
    if kv_len > 1:
        assert not found.says(bias * 1.1, tokens, 2, kv_len)
        other = bias.clone()
        other[1, 0, -1] = 0
        assert not found.says(other, tokens, 2, kv_len)


def test_masks_are_read_in_the_form_in_which_they_come() -> None:
    seen = torch.ones(2, 1, 4, 4).tril().bool()
    seen[0, :, :, :2] = False
    added = torch.randn(2, 3, 4, 4).masked_fill(~seen, LOWEST)
    assert form_of(seen, None) == "seen"
    assert form_of(~seen, None) == "hidden"
    assert form_of(torch.zeros(seen.shape).masked_fill(~seen, LOWEST), None) == "seen"
    assert form_of(added, None) == "added"
    assert form_of(added, 2) is None
    assert form_of(torch.randn(2, 3, 4, 4), None) is None  # what comes later may be seen
    assert form_of(seen[:, 0], None) is None
    one = convert_mask(~seen, "hidden", None, None, 0, 2, 4)
    assert one is not None
    assert one.start.tolist() == [2, 0]
    assert convert_mask(added, "added", None, None, 0, 2, 4) is added
    assert convert_mask(added[..., :3], "added", None, None, 0, 2, 4) is None
    assert convert_mask(torch.randn(2, 3, 4, 4), "added", None, None, 0, 2, 4) is None


@pytest.mark.parametrize("name", WITH_SLOPES)
@pytest.mark.parametrize("padding", ["full", "left"])
def test_tokens_are_one_call_each(name: str, padding: str, lengths: list[int]) -> None:
    model, batch = DECODERS[name].build(), padded()[padding]
    expected = model.generate(**batch, max_new_tokens=12, do_sample=False)
    accelerate_for_cpu(model, dtype="float32")
    lengths.clear()
    assert torch.equal(model.generate(**batch, max_new_tokens=12, do_sample=False), expected)
    assert lengths == [LAYERS] * 12


@pytest.mark.parametrize(("name", "fused"), [("bloom", False), ("mpt", True), ("falcon-rw", True)])
def test_padding_between_tokens(name: str, fused: bool, lengths: list[int]) -> None:
    """BLOOM does not count it, so that distance is not what its bias says."""
    model, batch = DECODERS[name].build(), padded()["right"]
    expected = model.generate(**batch, max_new_tokens=12, do_sample=False)
    accelerate_for_cpu(model, dtype="float32")
    lengths.clear()
    assert torch.equal(model.generate(**batch, max_new_tokens=12, do_sample=False), expected)
    assert len(lengths) == (12 if fused else 1)


def bloom_layer(model: nn.Module, bias: Tensor, cache: CPUCache | None) -> Tensor:
    states = torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(2, 1, 5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), LOWEST)
    return model.transformer.h[0](states, bias, mask, layer_past=cache)[0]


@torch.no_grad()
def test_a_bias_of_the_callers_own_takes_the_layers_own_forward(lengths: list[int]) -> None:
    model = DECODERS["bloom"].build()
    bias = torch.randn(12, 1, 5, generator=torch.Generator().manual_seed(1))
    expected = bloom_layer(model, bias, None)
    accelerate_for_cpu(model, dtype="float32")
    lengths.clear()
    assert row_error(bloom_layer(model, bias, CPUCache(model.config)) + 0, expected) <= 1e-4
    assert lengths == []


def test_slopes_of_bfloat16_models_are_near_the_exact_ones() -> None:
    """The bias of a prompt of four tokens, rounded to 8 bits, is all that there is to read."""
    family = Decoder("Bloom", {"vocab_size": 128, "hidden_size": 320, "n_layer": LAYERS, "n_head": 20})
    slopes = []
    for dtype in (torch.float32, torch.bfloat16):
        model = accelerate_for_cpu(family.build().to(dtype), dtype=str(dtype).removeprefix("torch."))
        slopes.append(model.transformer.h[0].role.parts.alibi)
    assert torch.allclose(slopes[0], slopes[1], rtol=4e-3)
    exact = [2 ** (-0.5 * head) for head in range(1, 17)] + [2 ** (-0.25 * head) for head in (1, 3, 5, 7)]
    assert torch.allclose(slopes[0], torch.tensor(exact), rtol=1e-6)
