"""The Optimum-style classes: the table, loading and saving, and their place in transformers' pipelines."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
import transformers
from optimum.modeling_base import OptimizedModel
from transformers import BertConfig, BertTokenizerFast

import hf_cpu_accel
from hf_cpu_accel import CPUAccelConfig, explain
from hf_cpu_accel.frontends import optimum, tasks
from hf_cpu_accel.frontends.optimum import (
    CPUModel,
    CPUModelForFeatureExtraction,
    CPUModelForMaskedLM,
    CPUModelForSequenceClassification,
    CPUModelForTokenClassification,
)

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "film", "very"]
TEXTS = ["a good film", "bad", "a very very bad film"]
# Those that BERT has a head for; the others are in test_optimum_tasks.py.
BERT = (
    "FeatureExtraction",
    "SequenceClassification",
    "TokenClassification",
    "QuestionAnswering",
    "MaskedLM",
    "MultipleChoice",
    "NextSentencePrediction",
)
OF_BERT = [task for task in tasks.TASKS if task.name in BERT]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    vocabulary = tmp_path_factory.mktemp("words") / "vocab.txt"
    vocabulary.write_text("\n".join(WORDS))
    return BertTokenizerFast(vocab=str(vocabulary))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, tokenizer):
    """task name -> folder of a two-layer BERT with the head of the task, and its tokenizer."""
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
        initializer_range=0.1,
    )
    folders = {}
    for task in OF_BERT:
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp(task.name)
        getattr(transformers, task.auto_class).from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folders[task.name] = str(folder)
    return folders


@pytest.fixture
def folder(checkpoints):
    return checkpoints["SequenceClassification"]


@pytest.fixture
def batch(tokenizer):
    return tokenizer(TEXTS, padding=True, return_tensors="pt")


def weights(path):
    from safetensors.torch import load_file

    return load_file(f"{path}/model.safetensors")


def test_the_table_is_the_classes():
    assert tuple(optimum.__all__) == tasks.CLASS_NAMES
    for name in tasks.CLASS_NAMES:
        cls = getattr(optimum, name)
        assert issubclass(cls, CPUModel)
        assert issubclass(cls, OptimizedModel)
        assert cls.__module__ == "hf_cpu_accel.frontends.optimum"
        assert getattr(hf_cpu_accel, name) is cls
    for task in tasks.TASKS:
        assert {getattr(optimum, name).__name__ for name in task.class_names} == {task.class_name}


@pytest.mark.parametrize("task", OF_BERT, ids=lambda task: task.name)
def test_every_class_loads_and_agrees_with_transformers(task, checkpoints, batch):
    path = checkpoints[task.name]
    plain = getattr(transformers, task.auto_class).from_pretrained(path)
    model = getattr(optimum, task.class_name).from_pretrained(path, cpu_optimize="float32")
    inputs = {k: v.unsqueeze(0) for k, v in batch.items()} if task.name == "MultipleChoice" else batch
    with torch.inference_mode():
        expected, outputs = plain(**inputs), model(**inputs)
    assert list(outputs) == list(expected)
    tokens = batch["attention_mask"].bool()
    for name, tensor in expected.items():
        per_token = tensor.shape[:2] == tokens.shape  # what is said of the padding is nobody's
        ours, theirs = (outputs[name][tokens], tensor[tokens]) if per_token else (outputs[name], tensor)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert any(item.reason is None for item in explain(model.model).items)
    assert task.outputs in type(model).__doc__
    assert not model.can_generate()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_saved_checkpoint_is_an_ordinary_one(dtype, folder, tmp_path, batch):
    model = CPUModelForSequenceClassification.from_pretrained(folder, cpu_optimize=dtype)
    with torch.inference_mode():
        before = model(**batch).logits
        model.save_pretrained(tmp_path)
        assert torch.equal(model(**batch).logits, before)  # accelerated again, as it was
    assert explain(model.model).dtype == dtype

    saved, original = weights(tmp_path), weights(folder)
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in original)
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(plain).__name__ == "BertForSequenceClassification"
    assert CPUAccelConfig.load(tmp_path) == CPUAccelConfig(dtype=dtype)

    again = CPUModelForSequenceClassification.from_pretrained(tmp_path)
    assert again.cpu_config == CPUAccelConfig(dtype=dtype)
    with torch.inference_mode():
        assert torch.equal(again(**batch).logits, before)


def test_changes_of_the_config_are_saved(folder, tmp_path):
    model = CPUModelForSequenceClassification.from_pretrained(folder, cpu_optimize="float32")
    model.config.id2label = {0: "good", 1: "bad"}
    model.config.problem_type = "regression"
    model.save_pretrained(tmp_path)
    assert model.config.id2label == {0: "good", 1: "bad"}
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["id2label"], saved["problem_type"]) == ({"0": "good", "1": "bad"}, "regression")


def test_saving_dropped_originals_says_what_is_wrong(folder, tmp_path, batch):
    config = CPUAccelConfig(dtype="int8", originals="drop")
    model = CPUModelForSequenceClassification.from_pretrained(folder, cpu_optimize=config)
    with torch.inference_mode():
        before = model(**batch).logits
        with pytest.raises(RuntimeError, match="drop"):
            model.save_pretrained(tmp_path)
        assert torch.equal(model(**batch).logits, before)


def test_an_explicit_choice_beats_the_saved_one(folder, tmp_path):
    CPUModelForSequenceClassification.from_pretrained(folder, cpu_optimize="bfloat16").save_pretrained(
        tmp_path
    )
    model = CPUModelForSequenceClassification.from_pretrained(tmp_path, cpu_optimize="float32")
    assert model.cpu_config == CPUAccelConfig(dtype="float32")


def test_plain_model_without_acceleration(folder, tmp_path):
    model = CPUModelForSequenceClassification.from_pretrained(folder, cpu_optimize=False)
    assert model.cpu_config is None
    assert not any(item.reason is None for item in explain(model.model).items)
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "cpu_accel_config.json").exists()


def test_transformers_keywords(folder):
    model = CPUModelForSequenceClassification.from_pretrained(
        folder,
        num_labels=2,
        problem_type="regression",
        dtype=torch.bfloat16,
        attn_implementation="sdpa",
        export=True,
    )
    assert model.config.problem_type == "regression"
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cpu_optimize": "int9"}, ValueError, "int9"),
        ({"cpu_optimize": 8}, TypeError, "cpu_optimize=8"),
        ({"device_map": "auto"}, ValueError, "device_map='auto'.*device_map='cpu'"),
    ],
)
def test_bad_arguments_raise_before_the_weights_are_read(options, error, message, folder, monkeypatch):
    def load(*args, **kwargs):
        pytest.fail("the weights were loaded")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(transformers.AutoModelForSequenceClassification, "from_pretrained", load)
    with pytest.raises(error, match=message):
        CPUModelForSequenceClassification.from_pretrained(folder, **options)


@pytest.mark.parametrize(
    ("cls", "name", "task", "texts"),
    [
        (CPUModelForSequenceClassification, "SequenceClassification", "text-classification", TEXTS),
        (CPUModelForTokenClassification, "TokenClassification", "token-classification", TEXTS),
        (CPUModelForFeatureExtraction, "FeatureExtraction", "feature-extraction", TEXTS),
        (CPUModelForMaskedLM, "MaskedLM", "fill-mask", ["a [MASK] film"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_in_a_pipeline(cls, name, task, texts, checkpoints, tokenizer, monkeypatch):
    errors = []
    monkeypatch.setattr(transformers.pipelines.base.logger, "error", errors.append)
    plain = transformers.pipeline(task, checkpoints[name], tokenizer=tokenizer, device="cpu")
    # The feature-extraction pipeline gives the features of the padding too.
    config = CPUAccelConfig(dtype="float32", padding="compute")
    model = cls.from_pretrained(checkpoints[name], cpu_optimize=config)
    pipe = transformers.pipeline(task, model=model, tokenizer=tokenizer, device="cpu")
    assert errors == []  # "the model ... is not supported for ..."
    assert pipe.model is model
    assert repr(pipe)
    assert flat(pipe(texts, batch_size=2)) == pytest.approx(
        flat(plain(texts, batch_size=2)), rel=1e-4, abs=1e-5
    )


def flat(result):
    """All numbers in a pipeline's result, in order."""
    if isinstance(result, dict):
        return [number for value in result.values() for number in flat(value)]
    if isinstance(result, list):
        return [number for value in result for number in flat(value)]
    return [] if isinstance(result, str) or result is None else [float(result)]


def test_pipeline_saves_it(folder, tokenizer, tmp_path):
    model = CPUModelForSequenceClassification.from_pretrained(folder, cpu_optimize="int8")
    pipe = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu")
    pipe.save_pretrained(tmp_path)
    again = transformers.pipeline("text-classification", str(tmp_path), device="cpu")
    assert again(TEXTS)[0].keys() == {"label", "score"}


def test_stays_on_the_cpu(folder):
    model = CPUModelForSequenceClassification.from_pretrained(folder)
    assert model.to("cpu") is model.to(torch.device("cpu")) is model.eval() is model
    for device in ("cuda", 0, torch.float16):
        with pytest.raises(ValueError, match=r"pass device='cpu'|set the dtype with"):
            model.to(device)


def test_other_attributes_come_from_the_model(folder):
    model = CPUModelForSequenceClassification.from_pretrained(folder)
    assert model.device == torch.device("cpu")
    assert model.main_input_name == "input_ids"
    assert model.config is model.model.config
    with pytest.raises(AttributeError, match="no_such_thing"):
        model.no_such_thing  # noqa: B018


def test_copies_and_pickles(folder, batch):
    model = CPUModelForSequenceClassification.from_pretrained(folder, cpu_optimize="float32")
    with torch.inference_mode():
        expected = model(**batch).logits
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(other) is CPUModelForSequenceClassification
            torch.testing.assert_close(other(**batch).logits, expected, rtol=1e-4, atol=1e-5)
