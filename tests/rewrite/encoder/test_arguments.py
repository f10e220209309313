"""Arguments of fused encoder layers: known and unknown masks, biases, windows and positions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain
from hf_cpu_accel.lazy.window_mask import WindowMask
from hf_cpu_accel.rewrite.encoder import layer as encoder_layer
from hf_cpu_accel.rewrite.encoder.fuse import STRUCTURE
from tests.rewrite.encoder_families import (
    SIZES,
    bert,
    clip_text,
    fused_layers,
    inputs,
    layoutlm,
    modernbert,
    run,
    t5,
)


def test_arguments_beyond_a_mask_take_the_layers_own_forward() -> None:
    model = bert()
    layer = model.encoder.layer[0]
    hidden = torch.randn(2, 5, 64)
    bias = torch.randn(2, 1, 5, 5)
    with torch.no_grad():
        expected = layer(hidden, bias)
        accelerate_for_cpu(model, dtype="float32")
        fused = model.encoder.layer[0]
        torch.testing.assert_close(fused(hidden, bias), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            fused(hidden, bias, None, None, None, some_flag=True), expected, rtol=1e-4, atol=1e-5
        )


def test_arguments_that_nobody_knows_take_the_layers_own_forward() -> None:
    class Shifted(tf.models.bert.modeling_bert.BertLayer):
        def forward(self, hidden_states: Tensor, offset: Tensor | None = None) -> Tensor:
            hidden = hidden_states if offset is None else hidden_states + offset
            return super().forward(hidden)

    model = nn.Sequential(Shifted(tf.BertConfig(_attn_implementation="sdpa", **SIZES))).eval()
    hidden = torch.randn(2, 5, 64)
    offset = torch.randn(2, 5, 64)
    with torch.no_grad():
        expected = [model(hidden), model[0](hidden, offset)]
        accelerate_for_cpu(model, dtype="float32")
        assert len(fused_layers(model)) == 1
        for ours, theirs in zip([model(hidden), model[0](hidden, offset)], expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_text_longer_than_any_that_the_biases_were_read_from() -> None:
    model = t5()
    batch = {
        "input_ids": torch.randint(3, 99, (1, 700)),
        "attention_mask": torch.ones(1, 700, dtype=torch.long),
    }
    before = run(model, batch)
    accelerate_for_cpu(model, dtype="float32")
    torch.testing.assert_close(run(model, batch), before, rtol=1e-4, atol=1e-5)


def test_a_position_bias_is_what_it_was_for_whoever_reads_it() -> None:
    model = t5()
    layer, hidden = model.encoder.block[0], torch.randn(1, 9, 64)
    with torch.no_grad():
        expected, bias, _ = layer(hidden)
        accelerate_for_cpu(model, dtype="float32")
        first, second = model.encoder.block
        output, given, _ = first(hidden)
        assert torch.equal(given + 0, bias)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        # The same values in an ordinary tensor, and half of them, which no table has.
        torch.testing.assert_close(
            second(hidden, None, bias)[0], second(hidden, None, given)[0], rtol=1e-4, atol=1e-5
        )
        halved = second._original_class.forward(second, hidden, None, bias / 2)[0]
        torch.testing.assert_close(second(hidden, None, bias / 2)[0], halved, rtol=1e-4, atol=1e-5)


def test_windows_are_not_spelt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = modernbert()
    batch = inputs(model)
    before = run(model, batch)
    accelerate_for_cpu(model, dtype="float32", verify=True)  # no first call with masks that are spelt out
    made: list[int] = []
    make = WindowMask._make
    monkeypatch.setattr(WindowMask, "_make", lambda mask: made.append(1) or make(mask))
    torch.testing.assert_close(run(model, batch), before, rtol=1e-4, atol=1e-5)
    assert not made
    # A layer that runs its own forward reads the mask.
    model.layers[1].mlp.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(run(model, batch), before, rtol=1e-4, atol=1e-5)
    assert made
    computed = accelerate_for_cpu(model, dtype="float32", padding="compute")
    torch.testing.assert_close(run(computed, batch), before, rtol=1e-4, atol=1e-5)


def test_tables_for_other_positions_than_the_tokens_take_the_own_forward() -> None:
    model = modernbert()
    accelerate_for_cpu(model, dtype="float32")
    layer, hidden = model.layers[1], torch.randn(1, 9, 64)
    assert layer._inputs(hidden, (None, (torch.ones(1, 9, 16), torch.zeros(1, 9, 16))), {}) is not None
    assert layer._inputs(hidden, (None, (torch.ones(1, 5, 16), torch.zeros(1, 5, 16))), {}) is None
    assert layer._inputs(hidden, (None,), {}) is None


def test_padding_comes_out_as_zeros_or_as_in_the_original() -> None:
    model = bert()
    batch = inputs(model)
    tokens = batch["attention_mask"].bool()
    with torch.no_grad():
        before = model(**batch)[0]
        skipped = accelerate_for_cpu(model, dtype="float32")(**batch)[0]
        computed = accelerate_for_cpu(model, dtype="float32", padding="compute")(**batch)[0]
    assert (skipped[~tokens] == 0).all()
    torch.testing.assert_close(skipped[tokens], before[tokens], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(computed, before, rtol=1e-4, atol=1e-5)


def test_a_mask_of_the_callers_own_hides_keys_and_no_queries() -> None:
    model = bert()
    batch = inputs(model)
    own = batch["attention_mask"].bool()[:, None, None].expand(2, 1, 7, 7)
    with torch.no_grad():
        before = model(batch["input_ids"], attention_mask=own)[0]
        after = accelerate_for_cpu(model, dtype="float32")(batch["input_ids"], attention_mask=own)[0]
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", [layoutlm, clip_text])
def test_tokens_do_not_see_later_ones_where_the_original_says_so_without_a_mask(
    build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its attention's default, or by an argument."""
    model = build()
    ids = {"input_ids": torch.randint(3, 99, (2, 7), generator=torch.Generator().manual_seed(1))}
    before = run(model, ids)
    accelerate_for_cpu(model, dtype="float32")
    served: list[int] = []
    op = encoder_layer.bound_encoder_layer
    monkeypatch.setattr(encoder_layer, "bound_encoder_layer", lambda *inputs: served.append(1) or op(*inputs))
    torch.testing.assert_close(run(model, ids), before, rtol=1e-4, atol=1e-5)
    assert len(served) == 2
    layer, hidden = fused_layers(model)[0], torch.randn(2, 7, 64)
    assert layer.accepts(hidden, is_causal=True)
    told = layer._original_class.forward(layer, hidden, attention_mask=None, is_causal=False)
    torch.testing.assert_close(
        layer(hidden, attention_mask=None, is_causal=False), told, rtol=1e-4, atol=1e-5
    )


@pytest.mark.usefixtures("nothing_is_recorded")
def test_tables_for_neighboring_features_are_told() -> None:
    model = accelerate_for_cpu(tf.RoFormerModel(tf.RoFormerConfig(**SIZES)).eval(), dtype="float32")
    assert not fused_layers(model)
    reasons = [item.reason for item in explain(model).left if item.structure == STRUCTURE]
    assert len(reasons) == 2
    assert all("rotates adjacent features" in reason for reason in reasons)
