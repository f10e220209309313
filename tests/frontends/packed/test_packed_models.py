"""Packed folders: the same layers, the same answers bit for bit, in every form and for every kind of model."""

from __future__ import annotations

import copy
import json
import pickle
import warnings

import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForSequenceClassification, BertModel

from hf_cpu_accel import CPUAccelConfig, accelerate_for_cpu, explain, restore
from hf_cpu_accel.check.comparison import DISAGREES
from hf_cpu_accel.rewrite.core.packed_module import PackedModule
from tests.frontends.packed.packed_cases import MODELS, bert, llama, tokens

EVERY = ("float32", "bfloat16", "int8", "int8-weight", "int4")
CASES = [(name, dtype) for name in ("bert", "llama", "mixtral", "resnet") for dtype in EVERY]
CASES += [(name, dtype) for name in ("gpt2", "t5", "whisper", "vit") for dtype in ("bfloat16", "int8")]
CASES += [
    ("siglip", "bfloat16"),
    ("siglip", "int8"),
    ("gpt_oss", "int4"),
    ("wav2vec2", "int8"),
    ("mimi", "float32"),
    ("mimi", "int8"),
    ("encodec", "float32"),
    ("encodec", "int8"),
]

pytestmark = pytest.mark.usefixtures("installed")


def answers(model, inputs):
    with torch.no_grad():
        outputs = [model(**inputs)[1 if "audio_codes" in inputs else 0]]
        if model.can_generate() and "input_ids" in inputs:
            outputs.append(model.generate(tokens(), max_new_tokens=6, do_sample=False, pad_token_id=0))
        return outputs


def packed_folder(model, folder, dtype="int8", **options):
    accelerate_for_cpu(model.eval(), dtype=dtype, **options)
    model.save_pretrained(folder, packed=True)
    return folder


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_loaded_model_equals_the_saved_one(name, dtype, tmp_path):
    model, inputs, auto = MODELS[name]()
    packed_folder(model, tmp_path, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # of another plan, or of a fused layer that is off
        loaded, info = auto.from_pretrained(tmp_path, output_loading_info=True)
        for ours, theirs in zip(answers(loaded, inputs), answers(model, inputs), strict=True):
            assert torch.equal(ours, theirs)
    assert not any(info.values())
    assert type(loaded) is type(model)
    assert explain(loaded).items == explain(model).items
    assert list(loaded.state_dict()) == list(model.state_dict())


def test_weights_that_are_bfloat16_stay_so(tmp_path):
    model, inputs, auto = llama()
    model = type(model)._from_config(model.config, dtype=torch.bfloat16)
    packed_folder(model, tmp_path, "bfloat16")
    loaded = auto.from_pretrained(tmp_path)
    assert loaded.dtype is torch.bfloat16
    assert all(map(torch.equal, answers(loaded, inputs), answers(model, inputs)))


def test_nothing_is_packed_or_drawn_while_loading(tmp_path, monkeypatch):
    packed_folder(bert()[0], tmp_path)
    monkeypatch.setattr("hf_cpu_accel.rewrite.linear.match.pack_linear", None)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)
    (storage,) = {
        module.packed.data.untyped_storage().data_ptr()
        for module in loaded.modules()
        if isinstance(module, PackedModule)
    }
    assert storage  # one mapped file


def test_a_headless_class_loads_its_part(tmp_path):
    model, inputs, _ = bert()
    packed_folder(model, tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is BertModel
    with torch.no_grad():
        assert torch.equal(loaded(**inputs)[0], model.bert(**inputs)[0])


def test_a_class_with_another_head_leaves_that_to_be_trained(tmp_path):
    model, inputs, _ = bert()
    packed_folder(model.bert, tmp_path)
    loaded, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {"classifier.weight", "classifier.bias"}
    with torch.no_grad():
        assert torch.equal(loaded.bert(**inputs)[0], model.bert(**inputs)[0])


def test_the_folder_has_one_file_of_weights_and_says_what_they_are(tmp_path):
    packed_folder(bert()[0], tmp_path, "int4", int4_group=64, threads=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "cpu_accel.safetensors",
        "cpu_accel_config.json",
    ]
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (said["quant_method"], said["dtype"], said["format_version"]) == ("cpu_accel", "int4", 1)
    settings = CPUAccelConfig.load(tmp_path)
    assert (settings.dtype, settings.int4_group, settings.threads) == ("int4", 64, None)


def test_unpacked_modules_are_loaded_plain(tmp_path):
    model, inputs, auto = bert()
    packed_folder(model, tmp_path, skip_modules=("bert.encoder.layer.1",))
    loaded = auto.from_pretrained(tmp_path)
    assert torch.equal(answers(loaded, inputs)[0], answers(model, inputs)[0])
    assert type(loaded.bert.encoder.layer[1].output.dense) is torch.nn.Linear


def test_a_weight_that_failed_verification_is_left_again(tmp_path, monkeypatch):
    from hf_cpu_accel.rewrite.linear import match

    model, inputs, auto = llama()
    honest = match.compare
    calls = iter(range(100))

    def compare(output, reference):
        return honest(output + 1e9 if next(calls) == 1 else output, reference)

    monkeypatch.setattr(match, "compare", compare)
    packed_folder(model, tmp_path)
    monkeypatch.undo()
    left = [item.name for item in explain(model).left if item.reason.startswith(DISAGREES)]
    loaded = auto.from_pretrained(tmp_path)
    assert len(left) == 1
    assert type(loaded.get_submodule(left[0])) is torch.nn.Linear
    assert torch.equal(answers(loaded, inputs)[0], answers(model, inputs)[0])


def test_restore_says_where_the_originals_are(tmp_path):
    packed_folder(bert()[0], tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"without the original ones.*load the checkpoint"):
        restore(loaded)
    assert explain(loaded).replaced


def test_float32_is_restored_bit_for_bit(tmp_path):
    model, _, auto = bert()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    packed_folder(model, tmp_path, "float32")
    loaded = restore(auto.from_pretrained(tmp_path))
    assert type(loaded.bert.encoder.layer[0].output.dense) is torch.nn.Linear
    state = loaded.state_dict()
    assert all(torch.equal(state[name], value) for name, value in before.items())
    assert all(parameter.is_contiguous() for parameter in loaded.parameters())


def test_loaded_models_are_copied_pickled_and_saved_again(tmp_path):
    model, inputs, auto = bert()
    packed_folder(model, tmp_path / "one")
    expected = answers(model, inputs)[0]
    loaded = auto.from_pretrained(tmp_path / "one")
    for other in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        assert torch.equal(answers(other, inputs)[0], expected)
    loaded.save_pretrained(tmp_path / "one")  # over the file that it is mapped from
    assert torch.equal(answers(loaded, inputs)[0], expected)
    assert torch.equal(answers(auto.from_pretrained(tmp_path / "one"), inputs)[0], expected)


def test_pipelines_and_the_keyword_take_a_packed_folder(tmp_path, folder):
    classifier = transformers.pipeline("text-classification", str(folder), device="cpu")
    accelerate_for_cpu(classifier, dtype="int8")
    classifier.model.save_pretrained(tmp_path, packed=True)
    classifier.tokenizer.save_pretrained(tmp_path)
    loaded = transformers.pipeline("text-classification", str(tmp_path), cpu_optimize=True)
    assert explain(loaded).dtype == "int8"
    assert loaded("a good film") == classifier("a good film")
