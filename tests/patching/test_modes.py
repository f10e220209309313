"""`model.eval()` of an accelerated model works as before, and sets nothing if nothing has to change."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

from hf_cpu_accel import accelerate_for_cpu, restore


class Counting(nn.Module):
    """Does more than torch's when its mode is set."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def train(self, mode: bool = True) -> Counting:
        self.calls += 1
        return super().train(mode)


@pytest.fixture
def model() -> BertModel:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return accelerate_for_cpu(BertModel(BertConfig(**sizes)).eval(), dtype="float32")


def modes(model: nn.Module) -> set[bool]:
    return {module.training for module in model.modules()}


def test_a_model_goes_into_training_mode_and_back(model: BertModel) -> None:
    assert model.train() is model
    assert modes(model) == {True}
    assert model.eval() is model
    assert modes(model) == {False}
    assert model.eval() is model
    assert modes(model) == {False}
    with pytest.raises(ValueError, match="boolean"):
        model.train(0)  # type: ignore[arg-type]


def test_one_module_in_training_mode_is_found_wherever_it_is(model: BertModel) -> None:
    for module in list(model.modules()):
        module.training = True
        nn.Sequential(model).eval()
        assert modes(model) == {False}


def test_nothing_is_set_where_all_is_set(model: BertModel, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    own = nn.Module.__setattr__

    def noting(module: nn.Module, name: str, value: Any) -> None:
        written.append(name)
        own(module, name, value)

    monkeypatch.setattr(nn.Module, "__setattr__", noting)
    model.eval()
    assert "training" not in written
    model.pooler.training = True
    written.clear()
    model.eval()
    assert written.count("training") == len(list(model.modules()))


def test_modules_that_do_more_are_told(model: BertModel) -> None:
    model.added = Counting()
    model.eval()
    assert model.added.calls == 1
    model.added = nn.Identity()
    calls: list[bool] = []
    model.added.train = calls.append  # type: ignore[method-assign,assignment]
    model.eval()
    assert calls == [False]


def test_copies_have_their_own_and_restored_models_none(model: BertModel) -> None:
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        made.train()
        assert modes(made) == {True}
        assert modes(model) == {False}
        assert made.eval() is made
        assert modes(made) == {False}
    restore(model)
    assert "train" not in vars(model)
    ids = torch.randint(5, 100, (1, 5))
    assert model.eval()(ids).last_hidden_state.isfinite().all()
