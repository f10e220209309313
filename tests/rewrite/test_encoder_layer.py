"""Whole encoder layers in a few ops: which layers, the same numbers, and what falls back to the layer's own forward."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite import encoder_layer
from hf_cpu_accel.rewrite.encoder_layer import STRUCTURE, FusedEncoderLayer
from hf_cpu_accel.rewrite.window_mask import WindowMask

SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}


def bert(**changes: object) -> nn.Module:
    return tf.BertModel(tf.BertConfig(**{**SIZES, **changes})).eval()


def distilbert() -> nn.Module:
    return tf.DistilBertModel(
        tf.DistilBertConfig(vocab_size=99, dim=64, n_layers=2, n_heads=4, hidden_dim=96)
    ).eval()


def bart_encoder() -> nn.Module:
    sizes = {
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
    }
    return (
        tf.BartModel(tf.BartConfig(vocab_size=99, d_model=64, encoder_layers=2, decoder_layers=1, **sizes))
        .eval()
        .encoder
    )


IMAGES = {
    **{name: size for name, size in SIZES.items() if name != "vocab_size"},
    "image_size": 32,
    "patch_size": 8,
}


def vit() -> nn.Module:
    return tf.ViTModel(tf.ViTConfig(**IMAGES)).eval()


def dinov2(value: float = 1e-4) -> nn.Module:
    """Its branches are multiplied by gains, which are tiny where a model has just been made."""
    return tf.Dinov2Model(tf.Dinov2Config(**{**IMAGES, "mlp_ratio": 2, "layerscale_value": value})).eval()


def dinov3() -> nn.Module:
    """Its tables are for patches alone: the tokens before them are not turned."""
    return tf.DINOv3ViTModel(tf.DINOv3ViTConfig(**IMAGES, num_register_tokens=3)).eval()


def pixtral() -> nn.Module:
    """RMS norms, gates, and tables of positions for rows and columns."""
    return tf.PixtralVisionModel(tf.PixtralVisionConfig(**IMAGES)).eval()


def yolos() -> nn.Module:
    """Its layers take no mask."""
    return tf.YolosModel(tf.YolosConfig(**{**IMAGES, "image_size": [32, 32]}, num_detection_tokens=5)).eval()


def t5(**changes: object) -> nn.Module:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "num_layers": 2, "vocab_size": 99}
    return tf.T5EncoderModel(tf.T5Config(**{**sizes, **changes})).eval()


def modernbert() -> nn.Module:
    """Windows, and a first layer without a first norm."""
    windows = {"local_attention": 4, "global_attn_every_n_layers": 2, "max_position_embeddings": 64}
    return tf.ModernBertModel(tf.ModernBertConfig(**{**SIZES, **windows}, pad_token_id=0)).eval()


def nomic() -> nn.Module:
    return tf.NomicBertModel(tf.NomicBertConfig(**SIZES)).eval()


def eurobert() -> nn.Module:
    return tf.EuroBertModel(tf.EuroBertConfig(**SIZES, pad_token_id=0)).eval()


def esm(kind: str) -> nn.Module:
    return tf.EsmModel(tf.EsmConfig(**SIZES, pad_token_id=0, position_embedding_type=kind)).eval()


def clip_text() -> nn.Module:
    """Causal, by a mask and by an argument."""
    return tf.CLIPTextModel(tf.CLIPTextConfig(**SIZES)).eval()


def hubert() -> nn.Module:
    front = {
        "conv_dim": (32, 32),
        "conv_stride": (5, 2),
        "conv_kernel": (10, 3),
        "num_conv_pos_embeddings": 16,
    }
    return tf.HubertModel(tf.HubertConfig(**SIZES, **front, num_conv_pos_embedding_groups=4)).eval()


def mpnet() -> nn.Module:
    """Attention is written out, and its masks are added."""
    return tf.MPNetModel(tf.MPNetConfig(**SIZES)).eval()


def whisper_encoder() -> nn.Module:
    """Its queries are scaled before attention, and its keys have no bias."""
    sizes = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96}
    config = tf.WhisperConfig(
        vocab_size=99,
        d_model=64,
        encoder_layers=2,
        decoder_layers=1,
        num_mel_bins=8,
        pad_token_id=0,
        max_source_positions=20,
        **sizes,
    )
    return tf.WhisperModel(config).eval().encoder


FUSED = {
    "bert": (bert, 2),
    "distilbert": (distilbert, 2),
    "bart": (bart_encoder, 2),
    "vit": (vit, 2),
    "whisper": (whisper_encoder, 2),
    "dinov2": (dinov2, 2),
    "pixtral": (pixtral, 2),
    "dinov3": (dinov3, 2),
    "yolos": (yolos, 2),
    "t5": (t5, 2),
    "t5 gated": (lambda: t5(feed_forward_proj="gated-gelu"), 2),
    "modernbert": (modernbert, 2),
    "mpnet": (mpnet, 2),
    "nomic": (nomic, 2),
    "eurobert": (eurobert, 2),
    "esm rotary": (lambda: esm("rotary"), 2),
    "esm absolute": (lambda: esm("absolute"), 2),
    "clip text": (clip_text, 2),
    "hubert": (hubert, 2),
}


def inputs(model: nn.Module) -> dict[str, Tensor]:
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    if model.main_input_name == "input_values":
        return {"input_values": torch.randn(1, 2000)}
    if model.main_input_name == "input_features":
        return {"input_features": torch.randn(2, 8, 40)}
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    return {"input_ids": torch.randint(3, 99, (2, 7)), "attention_mask": mask}


def run(model: nn.Module, batch: dict[str, Tensor], **more: object) -> Tensor:
    with torch.no_grad():
        hidden = model(**batch, **more)[0]
    return hidden * batch["attention_mask"][..., None] if "attention_mask" in batch else hidden


def fused_layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, FusedEncoderLayer)]


@pytest.mark.parametrize("name", FUSED)
def test_layers_are_fused_and_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, count = FUSED[name]
    served: list[int] = []
    op = encoder_layer._ENCODER_LAYER
    monkeypatch.setattr(encoder_layer, "_ENCODER_LAYER", lambda *inputs: served.append(1) or op(*inputs))
    model = build()
    batch = inputs(model)
    before, modules = run(model, batch), list(model.modules())
    accelerate_for_cpu(model, dtype="float32")
    assert len(fused_layers(model)) == count
    assert sum(item.structure == STRUCTURE and item.reason is None for item in explain(model).items) == count
    served.clear()
    torch.testing.assert_close(run(model, batch), before, rtol=1e-4, atol=1e-5)
    assert len(served) == count, "what the host passes sends layers to their own forward"
    restore(model)
    assert torch.equal(run(model, batch), before)
    assert all(one is other for one, other in zip(model.modules(), modules, strict=True))


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 0.02), ("int8", 0.06)])
def test_reduced_precision_stays_close(dtype: str, error: float) -> None:
    model = bert()
    batch = inputs(model)
    before = run(model, batch)
    accelerate_for_cpu(model, dtype=dtype)
    assert len(fused_layers(model)) == 2
    assert (run(model, batch) - before).norm() <= error * before.norm()


def test_the_class_and_the_paths_are_kept() -> None:
    model = bert()
    keys, layer_class = set(model.state_dict()), type(model.encoder.layer[0])
    accelerate_for_cpu(model, dtype="float32")
    assert isinstance(model.encoder.layer[0], layer_class)
    assert set(model.state_dict()) == keys


@pytest.mark.parametrize("when", ["before", "after"])
def test_hidden_states_can_be_captured(when: str) -> None:
    """transformers installs its capture hooks at first use, on whatever modules are there then."""
    model = bert()
    batch = inputs(model)
    reference = copy.deepcopy(model)
    with torch.no_grad():
        expected = reference(**batch, output_hidden_states=True).hidden_states
        if when == "before":
            model(**batch, output_hidden_states=True)
        accelerate_for_cpu(model, dtype="float32")
        got = model(**batch, output_hidden_states=True).hidden_states
        assert len(got) == len(expected) == 3
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        restore(model)
        again = model(**batch, output_hidden_states=True).hidden_states
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, expected, strict=True))


def test_a_causal_decoder_is_not_mistaken_for_an_encoder() -> None:
    model = tf.BertLMHeadModel(tf.BertConfig(is_decoder=True, **SIZES)).eval()
    batch = {"input_ids": torch.randint(3, 99, (2, 7))}
    with torch.no_grad():
        before = model(**batch).logits
        generated = model.generate(batch["input_ids"], max_new_tokens=5, do_sample=False)
        accelerate_for_cpu(model, dtype="float32")
        assert not fused_layers(model)
        torch.testing.assert_close(model(**batch).logits, before, rtol=1e-4, atol=1e-5)
        assert torch.equal(model.generate(batch["input_ids"], max_new_tokens=5, do_sample=False), generated)


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


def test_a_layer_that_computes_something_else_is_left() -> None:
    class Doubled(tf.models.bert.modeling_bert.BertLayer):
        def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
            return 2 * super().forward(hidden_states, *args, **kwargs)

    model = bert()
    model.encoder.layer[1].__class__ = Doubled
    batch = inputs(model)
    before = run(model, batch)
    accelerate_for_cpu(model, dtype="float32")
    assert len(fused_layers(model)) == 1
    torch.testing.assert_close(run(model, batch), before, rtol=1e-4, atol=1e-4)


def test_copies_and_pickles_work_and_are_independent() -> None:
    model = bert()
    batch = inputs(model)
    before = run(model, batch)
    accelerate_for_cpu(model, dtype="float32", originals="memory")
    accelerated = run(model, batch)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(fused_layers(twin)) == 2
        assert torch.equal(run(twin, batch), accelerated)
        restore(twin)
        assert torch.equal(run(twin, batch), before)
    assert len(fused_layers(model)) == 2


def test_the_fused_model_traces_in_one_graph() -> None:
    model = bert()
    accelerate_for_cpu(model, dtype="float32")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (5, 9):
        batch = {"input_ids": torch.randint(3, 99, (2, length))}
        torch.testing.assert_close(run(compiled, batch), run(model, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_inside_a_layer_are_not_bypassed(when: str) -> None:
    model = bert()
    batch = inputs(model)
    seen: list[str] = []

    def install(layer: nn.Module) -> None:
        layer.attention.self.register_forward_pre_hook(lambda module, args: seen.append("pre"))
        layer.output.LayerNorm.register_forward_hook(lambda module, args, output: seen.append("norm"))

    if when == "before":
        install(model.encoder.layer[0])
    accelerate_for_cpu(model, dtype="float32")
    if when == "after":
        model.encoder.layer[0].attention.self.register_forward_pre_hook(
            lambda module, args: seen.append("pre")
        )
    run(model, batch)
    assert "pre" in seen
    assert ("norm" in seen) == (when == "before")


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


def test_tiny_gains_do_not_hide_what_a_branch_computes() -> None:
    class Absolute(nn.Module):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return hidden_states.abs()

    model = dinov2(1e-6)
    model.encoder.layer[1].mlp.activation_fn = Absolute().eval()
    accelerate_for_cpu(model, dtype="float32")
    assert len(fused_layers(model)) == 1


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
    accelerate_for_cpu(model, dtype="float32")
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


def test_a_layer_that_others_serve_faster_runs_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bert()
    batch = inputs(model)
    before = run(model, batch)
    accelerate_for_cpu(model, dtype="float32")
    asked: list[int] = []
    monkeypatch.setattr(encoder_layer, "own_everywhere", lambda linears, rows: asked.append(rows))
    torch.testing.assert_close(run(model, batch), before, rtol=1e-4, atol=1e-5)
    assert asked == [14, 14]


def test_heads_stay_float32_under_int8() -> None:
    model = tf.BertForSequenceClassification(tf.BertConfig(**SIZES, num_labels=20)).eval()
    dtypes = {item.name: item.dtype for item in explain(accelerate_for_cpu(model, dtype="int8")).items}
    assert dtypes["bert.pooler"] == dtypes["classifier"] == "float32"
    assert dtypes["bert.encoder.layer.0.attention.self.query"] == "int8"
