"""RWKV halves weights of later layers in its first inference call, when packed ones are read-only."""

import copy

import torch
from transformers import RwkvConfig, RwkvForCausalLM

from hf_cpu_accel import accelerate_for_cpu, restore

IDS = torch.randint(3, 200, (2, 9), generator=torch.Generator().manual_seed(0))


def rwkv():
    torch.manual_seed(0)
    config = RwkvConfig(
        vocab_size=200, hidden_size=64, attention_hidden_size=64, num_hidden_layers=4, rescale_every=2
    )
    return RwkvForCausalLM(config).eval()


def test_a_model_that_was_never_called():
    model = rwkv()
    expected = copy.deepcopy(model).generate(IDS, max_new_tokens=20, do_sample=False, pad_token_id=0)
    accelerate_for_cpu(model, dtype="float32")
    assert torch.equal(model.generate(IDS, max_new_tokens=20, do_sample=False, pad_token_id=0), expected)


def test_weights_come_back_bit_for_bit():
    model = rwkv()
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    accelerate_for_cpu(model)
    restore(model)
    assert not model.rwkv.layers_are_rescaled
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())


def test_one_that_was_called_stays_as_it_was_then():
    model = rwkv()
    with torch.no_grad():
        expected = model(IDS).logits
    restore(accelerate_for_cpu(model))
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, expected)
