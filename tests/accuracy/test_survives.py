"""A choice of dtypes lives as long as the acceleration: in copies, in packed folders, around what is called on originals."""

import copy
import pickle
import warnings

import pytest
import torch
from transformers import AutoModel, BertModel

import hf_cpu_accel
from hf_cpu_accel import CPUAccelConfig, accelerate_for_cpu, accelerated, explain, restore
from hf_cpu_accel.frontends import packed_saving
from hf_cpu_accel.lifecycle import on_originals
from hf_cpu_accel.patching.acceleration import accelerated_parts
from tests.accuracy.models import BAD, bert, llama, token_ids

IDS = token_ids(2)


def hidden(model):
    with torch.no_grad():
        return model(IDS[0]["input_ids"])[0]


def dtypes(model):
    return {item.name: item.dtype for item in explain(model).replaced}


@pytest.fixture(scope="module")
def chosen():
    return accelerate_for_cpu(bert(bad=True), accuracy=0.99, examples=IDS)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_the_choice(chosen, copied):
    other = copied(chosen)
    assert explain(other).choices == explain(chosen).choices
    assert torch.equal(hidden(other), hidden(chosen))


def test_a_copy_is_restored_by_itself(chosen):
    other = restore(copy.deepcopy(chosen))
    assert torch.equal(hidden(other), hidden(bert(bad=True)))
    assert accelerated_parts(chosen)


def test_packed_folders_keep_the_choice(chosen, tmp_path):
    chosen.save_pretrained(tmp_path, packed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none of a layer that is not computed as it was
        loaded = AutoModel.from_pretrained(tmp_path)
    assert isinstance(loaded, BertModel)
    assert dtypes(loaded) == dtypes(chosen)
    assert torch.equal(hidden(loaded), hidden(chosen))
    assert explain(loaded).choices == explain(chosen).choices
    assert "accuracy=0.99: " in str(explain(loaded))
    saved = CPUAccelConfig.load(tmp_path)
    assert (saved.dtype, saved.accuracy) == ("int8", None)
    # With which the checkpoint itself is packed alike, and nothing is searched.
    again = accelerate_for_cpu(bert(bad=True), saved)
    assert torch.equal(hidden(again), hidden(chosen))
    assert not explain(again).choices


def test_models_from_packed_folders_are_saved_again(chosen, tmp_path):
    chosen.save_pretrained(tmp_path / "first", packed=True)
    loaded = AutoModel.from_pretrained(tmp_path / "first")
    loaded.save_pretrained(tmp_path / "second", packed=True)
    again = AutoModel.from_pretrained(tmp_path / "second")
    assert torch.equal(hidden(again), hidden(chosen))
    assert explain(again).choices == explain(chosen).choices


def test_folders_with_an_invalid_choice_are_rejected(chosen, tmp_path, monkeypatch):
    monkeypatch.setattr(packed_saving, "_saved_choices", lambda plan: [{"color": "red"}])
    chosen.save_pretrained(tmp_path, packed=True)
    with pytest.raises(ValueError, match="choice of dtypes"):
        AutoModel.from_pretrained(tmp_path)


def test_methods_on_originals_do_not_search_again(chosen, monkeypatch):
    from hf_cpu_accel.accuracy import choose

    monkeypatch.setattr(choose._Search, "run", lambda self: 1 / 0)
    model = copy.deepcopy(chosen)
    with on_originals([model]):
        assert not accelerated_parts(model)
    assert explain(model).choices == explain(chosen).choices
    assert torch.equal(hidden(model), hidden(chosen))


def test_accelerated_goes_back_to_the_choice_without_a_search(chosen, monkeypatch):
    from hf_cpu_accel.accuracy import choose

    model = copy.deepcopy(chosen)
    monkeypatch.setattr(choose._Search, "run", lambda self: 1 / 0)
    with accelerated(model, dtype="float32"):
        assert not explain(model).choices
    assert explain(model).choices == explain(chosen).choices
    assert torch.equal(hidden(model), hidden(chosen))


def test_accelerated_restores_the_earlier_settings():
    model = bert(bad=True)
    with accelerated(model, accuracy=0.99, examples=IDS):
        assert BAD in dict(explain(model).choices[0].dtypes)
    assert not accelerated_parts(model)


def test_the_keyword_accepts_accuracy(tmp_path):
    bert(bad=True).save_pretrained(tmp_path)
    loaded = hf_cpu_accel and AutoModel.from_pretrained(
        tmp_path, cpu_optimize={"accuracy": 0.99, "examples": IDS}
    )
    assert BAD in dict(explain(loaded).choices[0].dtypes)
    with pytest.raises(ValueError, match=r"accuracy=2: "):
        AutoModel.from_pretrained(tmp_path / "nowhere", cpu_optimize={"accuracy": 2})
    with pytest.raises(TypeError, match=r"examples is a str"):
        AutoModel.from_pretrained(tmp_path / "nowhere", cpu_optimize={"accuracy": 0.9, "examples": "a"})


def test_generated_text_equals_that_with_explicit_dtypes():
    model = accelerate_for_cpu(llama(), accuracy=0.99, examples=token_ids(3, 40))
    (choice,) = explain(model).choices
    other = accelerate_for_cpu(llama(), dtype=choice.dtype, dtypes=dict(choice.dtypes))
    prompt = token_ids(1, 6)[0]["input_ids"]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **options), other.generate(prompt, **options))
