"""Models with float16 weights: computed in float32, float16 for callers, and restored bit for bit."""

import copy
import pickle

import pytest
import torch
import transformers
from torch import nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from tests.rewrite.float16_models import CASES, IDS, error, of, same, state

# Twice the largest error among the cases, relative to the norm of an output; float32 is compared with eager float16.
BOUNDS = {"auto": 0.03, "float32": 0.0, "bfloat16": 0.03, "int8": 0.2, "int4": 0.9}


@pytest.mark.parametrize("name", CASES)
def test_outputs_state_and_restore(name):
    case = CASES[name]
    model = case.build()
    before, saved, eager, truth = state(model), model.state_dict(), case.call(model), case.truth(model)
    signature = {key: (value.dtype, value.shape) for key, value in saved.items()}
    for dtype, bound in BOUNDS.items():
        accelerate_for_cpu(model, dtype=dtype)
        outputs = case.call(model)
        assert [output.dtype for output in outputs] == [output.dtype for output in eager]
        assert {output.dtype for output in outputs} == {torch.float16}
        assert error(outputs, truth) <= max(bound, 1.2 * error(eager, truth))
        assert {key: (value.dtype, value.shape) for key, value in model.state_dict().items()} == signature
    restore(model)
    assert same(state(model), before)
    assert all(map(torch.equal, case.call(model), eager))


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_that_of_the_same_model_in_float32(name):
    model = CASES[name].build()
    plan = explain(accelerate_for_cpu(model, dtype="float32"))
    assert plan.replaced
    assert any(note.startswith("float16 weights") for note in plan.notes)
    as_float32 = explain(accelerate_for_cpu(restore(model).float(), dtype="float32"))
    assert plan.items == as_float32.items
    assert not any(note.startswith("float16") for note in as_float32.notes)


@pytest.mark.parametrize("name", ["opt", "unet"])
def test_copies_and_pickles_are_models_of_their_own(name):
    case = CASES[name]
    model = case.build()
    before = state(model)
    accelerate_for_cpu(model, dtype="int8")
    expected = case.call(model)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(made, type(model))
        assert made.dtype is torch.float16
        assert all(map(torch.equal, case.call(made), expected))
    other = copy.deepcopy(model)
    restore(model)
    assert all(map(torch.equal, case.call(other), expected))
    assert same(state(restore(other)), before)
    assert type(model) is type(other) is type(case.build())


def test_it_is_accelerated_anew_with_another_dtype():
    case = CASES["bert"]
    model = case.build()
    before = state(model)
    for dtype in ("float32", "int8", "float32"):
        accelerate_for_cpu(model, dtype=dtype)
    assert error(case.call(model), case.truth(case.build())) < 1e-3
    assert same(state(restore(model)), before)


@pytest.mark.parametrize("originals", ["memory", "drop", "disk"])
def test_originals(originals):
    model = CASES["opt"].build()
    before = state(model)
    accelerate_for_cpu(model, dtype="int8", originals=originals)
    if originals == "drop":
        with pytest.raises(RuntimeError, match="originals='drop'"):
            restore(model)
    else:
        assert same(state(restore(model)), before)


def test_models_and_their_parts_say_float16():
    model = CASES["whisper"].build()
    accelerate_for_cpu(model, dtype="float32")
    assert model.dtype is model.model.encoder.dtype is torch.float16
    assert type(model).__name__ == "WhisperForConditionalGeneration"
    features = torch.randn(1, 16, 100)
    for given in (features.half(), features):
        assert model.get_encoder()(given).last_hidden_state.dtype is torch.float16
    assert {value.dtype for value in model.model.encoder.state_dict().values()} == {torch.float16}
    assert model.proj_out(torch.randn(2, 64).half()).dtype is torch.float16


def test_saved_models_are_float16(tmp_path):
    model = CASES["opt"].build()
    before = model.state_dict()
    accelerate_for_cpu(model, dtype="float32")
    model.save_pretrained(tmp_path)
    loaded = transformers.OPTForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype is torch.float16
    assert loaded.config.architectures == ["OPTForCausalLM"]
    assert same(loaded.state_dict(), before)
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight


def test_tied_weights_are_one_tensor_in_a_state_dict_and_after_restore():
    model = CASES["opt"].build()
    names = ("lm_head.weight", "model.decoder.embed_tokens.weight")
    for dtype in ("float32", "int8"):
        accelerate_for_cpu(model, dtype=dtype)
        saved = model.state_dict()
        assert len({saved[name].data_ptr() for name in names}) == 1
    restore(model)
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_casts():
    case = CASES["opt"]
    model = case.build()
    before, signature = state(model), {key: value.dtype for key, value in case.build().state_dict().items()}
    accelerate_for_cpu(model, dtype="float32")
    for cast in (model.half, lambda: model.to("cpu", torch.float16), lambda: model.to("cpu")):
        cast()
        assert model.dtype is torch.float16
        assert {key: value.dtype for key, value in model.state_dict().items()} == signature
    model.float()
    assert model.dtype is torch.float32
    assert {output.dtype for output in case.call(model)} == {torch.float32}
    model.half()
    assert {output.dtype for output in case.call(model)} == {torch.float16}
    assert same(state(restore(model)), before)
    accelerate_for_cpu(model, dtype="float32")
    model.bfloat16()
    assert {output.dtype for output in case.call(model, torch.bfloat16)} == {torch.bfloat16}
    with pytest.raises(RuntimeError, match="restore first"):
        model.half()
    assert same(state(restore(model)), {name: value.bfloat16() for name, value in before.items()})


def test_weights_that_are_kept_in_float32_stay_so(tmp_path):
    CASES["t5"].build().save_pretrained(tmp_path)
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16).eval()
    case, before = CASES["t5"], state(model)
    assert {value.dtype for value in before.values()} == {torch.float16, torch.float32}
    dtypes = {key: value.dtype for key, value in model.state_dict().items()}
    truth = case.truth(model)
    accelerate_for_cpu(model, dtype="float32")
    assert error(case.call(model), truth) < 1e-3
    assert {key: value.dtype for key, value in model.state_dict().items()} == dtypes
    with pytest.raises(RuntimeError, match="only to float32 or bfloat16"):
        model.half()  # eager would round those, too
    assert same(state(restore(model)), before)


def test_weights_in_other_strides_lie_so_again():
    model = CASES["linears"].build()
    model[0].weight = nn.Parameter(model[0].weight.detach().T.contiguous().T)
    model.register_buffer("expanded", torch.ones(1, dtype=torch.float16).expand(5))
    before = state(model)
    accelerate_for_cpu(model, dtype="float32")
    assert model[0].weight.stride() == (64, 1)
    assert same(state(restore(model)), before)


def test_layers_that_eager_float16_overflows_in():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).eval()
    with torch.no_grad():
        model[0].weight.fill_(100)
        model[1].weight.fill_(1e-4)
    model.half()
    input = torch.full((1, 64), 50.0).half()
    assert model(input).isinf().all()
    accelerate_for_cpu(model, dtype="float32")
    torch.testing.assert_close(model(input).float(), torch.full((1, 64), 2048.0), rtol=2e-2, atol=0)


def test_a_hook_in_the_place_of_the_forward_is_called():
    case = CASES["linears"]
    model, calls = case.build(), []
    forward = model.forward
    model.forward = lambda input: calls.append(input.dtype) or forward(input)
    accelerate_for_cpu(model, dtype="float32")
    assert case.call(model)[0].dtype is torch.float16
    assert calls == [torch.float32]
    restore(model)
    case.call(model)
    assert calls == [torch.float32, torch.float16]


def test_graphs_that_are_made_of_it_are_float16_outside():
    model = of(
        transformers,
        "BertModel",
        "BertConfig",
        {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 300},
    )()
    model = accelerate_for_cpu(model.eval().half(), dtype="float32")
    with torch.no_grad():
        expected = model(IDS)[0]
        exported = torch.export.export(model, (IDS,)).module()(IDS)[0]
        compiled = torch.compile(model, backend="eager", fullgraph=True)(IDS)[0]
    for output in (exported, compiled):
        assert output.dtype is torch.float16
        torch.testing.assert_close(output, expected)
