"""Masks that say what they hide instead of listing it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
    sdpa_mask,
)

from hf_cpu_accel.hosts.arguments import NATIVE_ATTENTION
from hf_cpu_accel.lazy.causal_mask import CausalMask, causal_mask, read_mask
from hf_cpu_accel.rewrite.attention.interface import register

LEFT = torch.tensor([[False] * 3 + [True] * 6, [True] * 9])
RIGHT = LEFT.flip(1)


def config(**settings: object) -> MistralConfig:
    register()
    return MistralConfig(attn_implementation=NATIVE_ATTENTION, **settings)


def mask_of(
    make: object, config: LlamaConfig, padding: Tensor | None, q_len: int = 9, **more: object
) -> object:
    embeds = torch.zeros(2, q_len, 4)
    return make(config=config, inputs_embeds=embeds, attention_mask=padding, past_key_values=None, **more)


@pytest.mark.parametrize("padding", [None, LEFT, RIGHT], ids=["full", "left", "right"])
@pytest.mark.parametrize("window", [None, 4, 30])
def test_the_values_are_those_of_transformers(padding: Tensor | None, window: int | None) -> None:
    make = create_causal_mask if window is None else create_sliding_window_causal_mask
    ours = mask_of(make, config(sliding_window=window), padding)
    theirs = mask_of(make, MistralConfig(attn_implementation="sdpa", sliding_window=window), padding)
    if theirs is None:
        assert ours is None
        return
    assert isinstance(ours, CausalMask)
    assert torch.equal(ours + False, theirs)
    assert (ours.shape, ours.dtype, ours.window) == (theirs.shape, torch.bool, window)
    start = None if padding is None or padding is RIGHT else [3, 0]
    assert (None if ours.start is None else ours.start.tolist()) == start


def test_other_patterns_are_made_by_transformers() -> None:
    llama = LlamaConfig(attn_implementation=NATIVE_ATTENTION)
    llama.attention_chunk_size = 4
    assert not isinstance(mask_of(create_chunked_causal_mask, llama, LEFT), CausalMask)
    prefix = mask_of(create_causal_mask, config(), None, or_mask_function=lambda b, h, q, k: k < 3)
    assert not isinstance(prefix, CausalMask)
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(2, 9)
    assert not isinstance(mask_of(create_causal_mask, config(), None, position_ids=packed), CausalMask)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 9), (9, 9)])
def test_nothing_to_say_is_none(q_len: int, kv_len: int) -> None:
    assert causal_mask(2, q_len, kv_len, kv_len - q_len, 0, None, torch.ones(2, kv_len).bool()) is None
    assert causal_mask(2, q_len, kv_len, kv_len - q_len, 0, kv_len, None) is None
    assert causal_mask(2, q_len, kv_len, kv_len - q_len, 0, kv_len - 1, None) is not None
    assert causal_mask(2, 3, 9, 6, 0, None, None) is not None


def test_bad_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="q_offset=2"):
        causal_mask(2, 1, 9, 2, 0, None, None)
    with pytest.raises(ValueError, match="padding of shape"):
        causal_mask(2, 1, 9, 8, 0, None, torch.ones(2, 8).bool())


@pytest.mark.parametrize("padding", [None, LEFT, RIGHT], ids=["full", "left", "right"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("added", [False, True])
def test_masks_with_values_are_read(padding: Tensor | None, window: int | None, added: bool) -> None:
    made = CausalMask.of(2, 9, 9, 0, window, padding).tensor
    mask = torch.zeros(made.shape).masked_fill(~made, torch.finfo(torch.float32).min) if added else made
    read = read_mask(mask, window)
    assert read is not None
    assert torch.equal(read.tensor, made)
    assert read_mask(mask, window) is read
    assert read_mask(mask, 7) is None
    odd = mask.clone()
    odd[:, :, 5, 3] = -1.0 if added else False
    assert read_mask(odd, window) is None


@pytest.mark.parametrize("q_len", [1, 3])
def test_masks_of_the_last_keys_are_read_with_what_was_before(q_len: int) -> None:
    padding = torch.cat([LEFT, torch.ones(2, 4).bool()], dim=1)
    made = CausalMask.of(2, q_len, 3 + q_len, 10 - q_len, 4, padding)
    read = read_mask(made.tensor.clone(), 4, padding[:, : 10 - q_len])
    assert read is not None
    assert torch.equal(read.tensor, made.tensor)
    assert torch.equal(read.padding, padding)
    assert read.start.tolist() == [3, 0]


@pytest.mark.parametrize("start", [0, 3, 8])
def test_keys_out_of_all_windows_are_taken_for_what_comes_after_them(start: int) -> None:
    padding = torch.arange(12).expand(2, 12) >= torch.tensor([[0], [start]])
    made = CausalMask.of(2, 2, 12, 0, 4, padding)
    read = read_mask(made.tensor.clone(), 4)
    assert read is not None
    assert torch.equal(read.tensor, made.tensor)
    assert (read.padding is None) == (start <= 7)  # the first key in a window


def test_a_row_of_padding_alone_starts_nowhere() -> None:
    padding = LEFT.clone()
    padding[0] = False
    assert CausalMask.of(2, 9, 9, 0, None, padding).start is None


def test_sdpa_mask_is_what_we_mean() -> None:
    ours = CausalMask.of(2, 3, 9, 0, None, LEFT).tensor
    theirs = sdpa_mask(2, 3, 9, q_offset=6, attention_mask=LEFT, allow_is_causal_skip=False)
    assert torch.equal(ours, theirs)
