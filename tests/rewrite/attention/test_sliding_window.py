"""Attention of Longformer and LED: windows, padding, and global tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LEDConfig, LEDModel, LongformerConfig, LongformerModel

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.check import compare
from hf_cpu_accel.rewrite.attention import sliding_window
from hf_cpu_accel.rewrite.attention.sliding_window import STRUCTURE, FusedSlidingWindowAttention

BATCH, LENGTH = 3, 37  # no multiple of a window: the host pads


def longformer() -> LongformerModel:
    torch.manual_seed(0)
    config = LongformerConfig(
        vocab_size=90,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        attention_window=8,
        max_position_embeddings=80,
        initializer_range=0.3,
        pad_token_id=1,
    )
    return LongformerModel(config, add_pooling_layer=False).eval()


def led() -> LEDModel:
    torch.manual_seed(0)
    config = LEDConfig(
        vocab_size=90,
        d_model=64,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        attention_window=8,
        max_encoder_position_embeddings=80,
        init_std=0.3,
    )
    return LEDModel(config).eval()


def batch_of(*, padded: bool, global_tokens: str) -> dict[str, Tensor]:
    ids = torch.randint(3, 90, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    mask, looks_at_all = torch.ones_like(ids), torch.zeros_like(ids)
    if padded:
        mask[0, 9:], mask[2, -5:] = 0, 0
    if global_tokens != "none":
        looks_at_all[:, 0] = 1
    if global_tokens == "of some more than of others":
        looks_at_all[1, (4, 20, 36)] = 1
    return {"input_ids": ids, "attention_mask": mask, "global_attention_mask": looks_at_all}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many global keys each call of the op in a window had."""
    made: list[int] = []
    op = sliding_window.attention

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("window") is not None:
            made.append(kwargs["global_keys"])
        return op(*args, **kwargs)

    monkeypatch.setattr(sliding_window, "attention", noted)
    return made


@torch.no_grad()
@pytest.mark.parametrize("global_tokens", ["none", "one each", "of some more than of others"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("make", [longformer, led])
def test_it_gives_what_the_host_gives(
    make: Callable[[], Any], padded: bool, global_tokens: str, calls: list[int]
) -> None:
    model, batch = make(), batch_of(padded=padded, global_tokens=global_tokens)
    seen = batch["attention_mask"].bool()
    name = "encoder_last_hidden_state" if make is led else "last_hidden_state"
    expected = model(**batch)[name]
    accelerate_for_cpu(model, dtype="float32")
    items = [item for item in explain(model).items if item.structure == STRUCTURE]
    assert [(item.op, item.reason) for item in items] == [("attention", None)] * 2
    calls.clear()
    for _ in range(3):  # compared with the host's, recorded, taken again
        assert compare(model(**batch)[name], expected, rows=seen).within(1e-4)
    most = {"none": 0, "one each": 1, "of some more than of others": 4}[global_tokens]
    assert len(calls) >= 6
    assert set(calls) == {most}
    restore(model)
    assert torch.equal(model(**batch)[name], expected)


@torch.no_grad()
def test_layers_run_whole_and_other_texts_too() -> None:
    model = longformer()
    stock = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    for padded, global_tokens in ((False, "none"), (True, "one each"), (False, "one each"), (True, "none")):
        batch = batch_of(padded=padded, global_tokens=global_tokens)
        seen, expected = batch["attention_mask"].bool(), stock(**batch).last_hidden_state
        for _ in range(2):
            assert compare(model(**batch).last_hidden_state, expected, rows=seen).within(1e-4)
    layers = [item for item in explain(model).items if item.name in ("encoder.layer.0", "encoder.layer.1")]
    assert [item.reason for item in layers] == [None, None]


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "allowed"), [("bfloat16", 0.02), ("int8", 0.1)])
def test_dtypes(dtype: str, allowed: float) -> None:
    model, batch = longformer(), batch_of(padded=True, global_tokens="one each")
    seen, expected = batch["attention_mask"].bool(), model(**batch).last_hidden_state
    accelerate_for_cpu(model, dtype=dtype)
    given = model(**batch).last_hidden_state
    assert (given - expected)[seen].norm() <= allowed * expected[seen].norm()


@torch.no_grad()
def test_who_asks_for_attention_weights_gets_the_hosts(calls: list[int]) -> None:
    model, batch = longformer(), batch_of(padded=True, global_tokens="one each")
    expected = model(**batch, output_attentions=True)
    accelerate_for_cpu(model, dtype="float32")
    calls.clear()
    given = model(**batch, output_attentions=True)
    assert not calls
    for name in ("attentions", "global_attentions"):
        for one, other in zip(given[name], expected[name], strict=True):
            assert (one - other).abs().max() <= 1e-4


@torch.no_grad()
def test_one_that_computes_something_else_is_left() -> None:
    class Doubled(type(longformer().encoder.layer[0].attention.self)):  # type: ignore[misc]
        def forward(
            self,
            hidden_states,
            attention_mask=None,
            is_index_masked=None,
            is_index_global_attn=None,
            is_global_attn=None,
            output_attentions=False,
        ):
            own = super().forward(
                hidden_states, attention_mask, is_index_masked, is_index_global_attn, is_global_attn
            )
            return (2 * own[0],)

    model, batch = longformer(), batch_of(padded=False, global_tokens="none")
    model.encoder.layer[1].attention.self.__class__ = Doubled
    expected = model(**batch).last_hidden_state
    accelerate_for_cpu(model, dtype="float32")
    fused = [isinstance(layer.attention.self, FusedSlidingWindowAttention) for layer in model.encoder.layer]
    assert fused == [True, False]
    assert compare(model(**batch).last_hidden_state, expected).within(1e-4)
