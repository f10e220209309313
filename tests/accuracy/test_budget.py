"""What is measured: the least cosine of a row, without padding; the perplexity of a language model."""

import math

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from hf_cpu_accel.accuracy.budget import CosineBudget, budget_of
from hf_cpu_accel.accuracy.calls import Call
from tests.accuracy.models import llama, token_ids


class Says(nn.Module):
    """Returns what it is told to."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, input=None, attention_mask=None):
        return self.output


def measured(before, now, **kwargs):
    model = Says(before)
    budget = CosineBudget(model, [Call((), kwargs)])
    model.output = now
    return budget.measured(model, enough=-2.0)


def test_the_worst_row_of_any_output():
    before = (torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 1.0]]))
    now = (torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.9]]))
    assert measured(before, before) == pytest.approx(1.0)
    assert measured(before, now) == pytest.approx(math.sqrt(0.5))


def test_padding_does_not_count():
    before = BaseModelOutput(last_hidden_state=torch.ones(2, 3, 4))
    now = BaseModelOutput(last_hidden_state=torch.ones(2, 3, 4))
    now.last_hidden_state[1, 2] = torch.tensor([0.0, 0.0, 0.0, 0.0])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    assert measured(before, now, attention_mask=mask) == 1.0
    assert measured(before, now) == 0.0


def test_rows_of_tokens_lose_their_padding_too():
    """The logits of where an answer begins are one row for each sequence."""
    before, now = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[1.0, 2.0, 0.0]])
    assert measured(before, now, attention_mask=torch.tensor([[1, 1, 0]])) == pytest.approx(1.0)


def test_single_numbers_of_all_calls_form_one_row():
    model = Says(torch.tensor([[2.0]]))
    budget = CosineBudget(model, [Call((), {}), Call((), {})])
    model.output = torch.tensor([[1.0]])
    assert budget.measured(model, 0.5) == pytest.approx(1.0)
    model.output = torch.tensor([[-1.0]])
    assert budget.measured(model, 0.5) == pytest.approx(-1.0)


def test_infinite_values_are_ignored_and_new_nans_are_the_worst_result():
    before = torch.tensor([[1.0, -math.inf, 2.0]])
    assert measured(before, torch.tensor([[1.0, -3.0, 2.0]])) == pytest.approx(1.0)
    assert measured(before, torch.tensor([[1.0, -3.0, math.nan]])) == -1.0


def test_other_shapes_are_the_worst_result():
    assert measured(torch.ones(2, 3), torch.ones(3, 3)) == -1.0


def test_sentence_transformers_are_compared_by_embeddings():
    before = {"token_embeddings": torch.ones(1, 2, 2), "sentence_embedding": torch.ones(1, 2)}
    now = {"token_embeddings": torch.zeros(1, 2, 2), "sentence_embedding": torch.ones(1, 2)}
    assert measured(before, now) == pytest.approx(1.0)


def test_losses_and_caches_are_not_compared():
    before = CausalLMOutput(loss=torch.tensor(1.0), logits=torch.ones(1, 2))
    now = CausalLMOutput(loss=torch.tensor(-1.0), logits=torch.ones(1, 2))
    assert measured(before, now) == pytest.approx(1.0)


def test_examples_that_the_model_rejects_are_named():
    with pytest.raises(ValueError, match=r"examples\[2\] is not accepted by Linear"):
        CosineBudget(nn.Linear(3, 2), [Call((torch.ones(1, 5),), {}, "examples[2]")])


def test_perplexity_covers_all_unmasked_tokens():
    model, (first, second) = llama(), token_ids(2, 9)
    mask = torch.ones_like(first["input_ids"])
    mask[0, 6:] = 0
    labels = second["input_ids"].clone()
    labels[0, :4] = -100
    calls = [Call((), {**first, "attention_mask": mask}), Call((), {**second, "labels": labels})]
    budget = budget_of(model, calls)
    assert budget.measure == "perplexity"
    assert budget.measured(model, 0.99) == 1.0

    def loss():
        with torch.no_grad():
            one = model(**first, attention_mask=mask).logits[0, :5].double().log_softmax(-1)
            two = model(**second).logits[0, 3:-1].double().log_softmax(-1)
        told = [one[place, first["input_ids"][0, place + 1]] for place in range(5)]
        told += [two[place, second["input_ids"][0, place + 4]] for place in range(5)]
        return -sum(told).item() / 10

    before = loss()
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    assert budget.measured(model, 0.99) == pytest.approx(math.exp(before - loss()), rel=1e-4)


def test_texts_of_one_token_are_rejected():
    model, (call,) = llama(), token_ids(1, 1)
    with pytest.raises(ValueError, match="no next token"):
        budget_of(model, [Call((), call)])


def test_repeated_calls_are_identical_and_keep_their_inputs():
    features = {"x": torch.ones(2)}

    class Draws(nn.Module):
        def forward(self, given):
            given["result"] = torch.randn(3)
            return given["result"]

    call = Call((features,), {})
    assert torch.equal(call(Draws()), call(Draws()))
    assert list(features) == ["x"]
