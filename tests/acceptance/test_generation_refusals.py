"""What users get wrong when they generate text: as transformers answers it, or clearer; and the next call works."""

import pytest
import torch
import transformers

from hf_cpu_accel import accelerate_for_cpu, restore
from tests.acceptance.writer import GREEDY, make_model

pytestmark = pytest.mark.usefixtures("one_thread")


def outcome(function):
    """What a call gives: its tokens, or the kind of its error, and the message if transformers looked for it."""
    try:
        return function().tolist()
    except (ValueError, TypeError) as error:
        return type(error), str(error)
    except Exception as error:
        return type(error)


BAD = {
    "no prompt": lambda model: model.generate(**GREEDY),
    "a mask that is too short": lambda model: model.generate(
        torch.ones(2, 6, dtype=torch.long), attention_mask=torch.ones(2, 4, dtype=torch.long), **GREEDY
    ),
    "a padded mask that is too short": lambda model: model.generate(
        torch.ones(2, 6, dtype=torch.long), attention_mask=torch.tensor([[0, 1, 1, 1]] * 2), **GREEDY
    ),
    "a mask of another batch": lambda model: model.generate(
        torch.ones(2, 6, dtype=torch.long), attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]] * 3), **GREEDY
    ),
    "tokens outside of the vocabulary": lambda model: model.generate(torch.tensor([[5, 400]]), **GREEDY),
    "floating point tokens": lambda model: model.generate(torch.ones(1, 4), **GREEDY),
    "a list": lambda model: model.generate([[5, 6, 7]], **GREEDY),
    "settings as a dictionary": lambda model: model.generate(
        torch.tensor([[5, 6]]), generation_config={"top_k": 3}
    ),
    "an unknown keyword": lambda model: model.generate(torch.tensor([[5, 6]]), **GREEDY, topk=3),
    "an argument too many": lambda model: model.generate(*[None] * 20),
    "a prompt longer than max_length": lambda model: model.generate(torch.tensor([[5, 6, 7]]), max_length=2),
    "no tokens to generate": lambda model: model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=0),
    "a contradiction": lambda model: model.generate(
        torch.tensor([[5, 6]]), num_return_sequences=2, do_sample=False
    ),
}


@pytest.mark.parametrize("call", BAD.values(), ids=BAD)
@pytest.mark.filterwarnings("ignore")
def test_bad_input_is_answered_as_by_transformers(eager, model, call):
    expected, answer = outcome(lambda: call(eager)), outcome(lambda: call(model))
    assert answer == expected
    good = torch.tensor([[5, 6, 7]])
    assert torch.equal(model.generate(good, **GREEDY), eager.generate(good, **GREEDY))


def test_an_empty_prompt_is_refused(eager, model):
    """transformers gives an error about shapes from inside of the model."""
    with pytest.raises(ValueError, match=r"\(2, 0\) is an empty prompt"):
        model.generate(torch.zeros(2, 0, dtype=torch.long), **GREEDY)
    good = torch.tensor([[5, 6, 7]])
    assert torch.equal(model.generate(good, **GREEDY), eager.generate(good, **GREEDY))


@pytest.mark.parametrize("position", ["learned", "rotary"])
def test_a_prompt_beyond_the_limit_of_the_model(position):
    """Learned positions end there; rotary ones go on, and nobody says that it is good."""
    if position == "learned":
        settings = {"vocab_size": 259, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**settings, eos_token_id=1, bos_token_id=2)
        ).eval()
    else:
        model = make_model(limit=32)
    outcomes = []
    for _ in range(2):
        outcomes.append(
            [outcome(lambda n=n: model.generate(torch.full((1, n), 7), **GREEDY)) for n in (40, 30, 5)]
        )
        accelerate_for_cpu(model, dtype="float32")
    assert outcomes[0] == outcomes[1]


def test_a_cache_of_another_model_or_batch_is_refused(model):
    asked = {**GREEDY, "return_dict_in_generate": True}
    ids = torch.tensor([[5, 6, 7, 8]])
    cache = model.generate(ids, **asked).past_key_values
    longer = torch.cat([ids, torch.full((1, 30), 9)], dim=1)
    other = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**model.config.to_dict(), "num_key_value_heads": 4})
    ).eval()
    accelerate_for_cpu(other, dtype="float32")
    with pytest.raises(ValueError, match=r"2 heads of 16 features.*pass a cache of the same model"):
        other.generate(longer, past_key_values=cache, **GREEDY)
    with pytest.raises(ValueError, match=r"batch size 1 .*but keys of batch size 2"):
        model.generate(longer.repeat(2, 1), past_key_values=cache, **GREEDY)
    deeper = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**model.config.to_dict(), "num_hidden_layers": 3})
    ).eval()
    accelerate_for_cpu(deeper, dtype="float32")
    with pytest.raises(ValueError, match="has 2 layers"):
        deeper.generate(longer, past_key_values=cache, **GREEDY)
    expected = restore(model).generate(longer, **GREEDY)
    accelerate_for_cpu(model, dtype="float32")
    cache = model.generate(ids, **asked).past_key_values
    assert model.generate(ids, **GREEDY).shape == (1, 20)
    assert torch.equal(model.generate(longer, **GREEDY), expected)
