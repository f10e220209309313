"""Encoder layers in a few ops: the matched layers, equal values, and no other change in their model."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.encoder import layer as encoder_layer
from hf_cpu_accel.rewrite.encoder.fuse import STRUCTURE
from tests.rewrite.encoder_families import FUSED, SIZES, bert, dinov2, fused_layers, inputs, run


@pytest.mark.parametrize("name", FUSED)
def test_layers_are_fused_and_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, count = FUSED[name]
    served: list[int] = []
    op = encoder_layer.bound_encoder_layer
    monkeypatch.setattr(encoder_layer, "bound_encoder_layer", lambda *inputs: served.append(1) or op(*inputs))
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
    """transformers installs its capture hooks at first use, on the modules at that time."""
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


def test_tiny_gains_do_not_hide_what_a_branch_computes() -> None:
    class Absolute(nn.Module):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return hidden_states.abs()

    model = dinov2(1e-6)
    model.encoder.layer[1].mlp.activation_fn = Absolute().eval()
    accelerate_for_cpu(model, dtype="float32")
    assert len(fused_layers(model)) == 1


def test_a_layer_that_others_serve_faster_runs_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bert()
    batch = inputs(model)
    before = run(model, batch)
    accelerate_for_cpu(model, dtype="float32", verify=True)
    asked: list[int] = []
    monkeypatch.setattr(encoder_layer, "native_everywhere", lambda linears, rows: asked.append(rows))
    torch.testing.assert_close(run(model, batch), before, rtol=1e-4, atol=1e-5)
    assert asked == [14, 14]


def test_heads_stay_float32_under_int8() -> None:
    model = tf.BertForSequenceClassification(tf.BertConfig(**SIZES, num_labels=20)).eval()
    dtypes = {item.name: item.dtype for item in explain(accelerate_for_cpu(model, dtype="int8")).items}
    assert dtypes["bert.pooler"] == dtypes["classifier"] == "float32"
    assert dtypes["bert.encoder.layer.0.attention.self.query"] == "int8"
