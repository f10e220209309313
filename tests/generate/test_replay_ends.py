"""Steps are not replayed where the model would differ from the captured steps."""

import ctypes

import pytest
import torch
from transformers import DynamicCache, LogitsProcessorList
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.generate.replay import capture, steps
from hf_cpu_accel.generate.replay.limits import Limits
from tests.generate.decoders import accelerated, build, prompt
from tests.generate.replaying import Once, assert_equal, falcon_h1, generate


class _Stretched(LlamaModel):
    """Past `long_context` tokens positions count half, which only Python decides."""

    def forward(self, input_ids=None, past_key_values=None, position_ids=None, **kwargs):
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        positions = torch.arange(input_ids.shape[1])[None] + past
        if past > self.config.long_context:
            positions = positions // 2
        return super().forward(input_ids, past_key_values=past_key_values, position_ids=positions, **kwargs)


def test_a_model_that_changes_at_a_number_of_its_config(replayed):
    config = build("llama").config
    config.long_context = 33
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(5)
    model.model.__class__ = _Stretched
    model = accelerate_for_cpu(model, dtype="float32")
    assert_equal(model, prompt(9))
    assert len(replayed) > 10


class _Noisy(LlamaModel):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.last_hidden_state = output.last_hidden_state + torch.randn(output.last_hidden_state.shape)
        return output


class _ByValue(LlamaModel):
    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids, **kwargs)
        output.last_hidden_state = output.last_hidden_state * (1 + input_ids[0, -1].item() % 2)
        return output


class _ByCount(LlamaModel):
    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids, **kwargs)
        odd = (input_ids % 2).nonzero()
        output.last_hidden_state = output.last_hidden_state * (1 + len(odd))
        return output


class _ByMask(LlamaModel):
    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids, **kwargs)
        output.last_hidden_state = output.last_hidden_state * (1 + len(input_ids[input_ids > 130]))
        return output


@pytest.mark.parametrize("kind", [_Noisy, _ByValue, _ByCount, _ByMask])
def test_steps_that_the_ops_do_not_tell_are_not_replayed(kind, replayed):
    model = build("llama")
    model.model.__class__ = kind
    model = accelerate_for_cpu(model, dtype="float32")
    torch.manual_seed(1)
    expected = generate(model, prompt(9), replay=False)
    torch.manual_seed(1)
    output = generate(model, prompt(9), replay=True)
    assert torch.equal(output.sequences, expected.sequences)
    assert not replayed


class _PastTheOps(LlamaModel):
    """Its output is filled by code that no op shows."""

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids, **kwargs)
        states = output.last_hidden_state.contiguous()
        filled = torch.empty_like(states)
        ctypes.memmove(filled.data_ptr(), states.data_ptr(), states.nbytes)
        output.last_hidden_state = filled
        return output


def test_ops_that_do_not_give_what_the_model_gives_are_noticed(replayed):
    model = build("llama")
    model.model.__class__ = _PastTheOps
    model = accelerate_for_cpu(model, dtype="float32")
    expected = generate(model, prompt(9), replay=False)
    assert torch.equal(generate(model, prompt(9), replay=True).sequences, expected.sequences)
    assert len(replayed) <= 1


def test_states_that_are_exchanged_meanwhile_count(replayed):
    outputs = []
    for replay in (False, True):
        model = accelerate_for_cpu(falcon_h1(), dtype="float32")
        cache = DynamicCache(config=model.config)

        def exchange(cache=cache):
            for layer in cache.layers:
                layer.conv_states[0] = layer.conv_states[0] * 2

        processors = LogitsProcessorList([Once(30, exchange)])
        outputs.append(
            generate(model, prompt(9), replay=replay, past_key_values=cache, logits_processor=processors)
        )
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert replayed.count(False) == 1


def test_the_length_is_that_of_the_cache_where_it_holds_more_than_the_text():
    model = accelerated("llama")
    cache = generate(model, prompt(30), replay=False, max_new_tokens=3, min_new_tokens=3).past_key_values
    assert steps.DecodeSteps(model, cache, 1, None)._length == 32


def test_models_that_are_compiled_by_the_user_are_not_captured(monkeypatch):
    model = accelerate_for_cpu(build("llama"), dtype="float32")
    expected = generate(model, prompt(9), replay=False)
    model.model.compile(backend="eager")
    monkeypatch.setattr(steps, "capture", None)
    assert torch.equal(generate(model, prompt(9), replay=True).sequences, expected.sequences)


def test_few_tokens_are_not_worth_it(monkeypatch):
    monkeypatch.setattr(steps, "capture", None)
    generate(accelerated("llama"), prompt(9), replay=True, max_new_tokens=8, min_new_tokens=8)


def test_limits_are_the_numbers_about_lengths():
    config = build("gemma2").config
    config.long_context, config.rope_parameters = 40, {"original_max_position_embeddings": 100}
    limits = Limits(config)  # its window is of 12 tokens, and its hidden states of 64
    assert [limits.after(length) for length in (1, 12, 37, 39, 40, 97)] == [12, 24, 40, 40, 48, 100]


def test_layers_by_concatenation(replayed):
    """Hybrids whose attention is in the layer with the recurrence have transformers' own cache layers."""
    model = accelerate_for_cpu(falcon_h1(), dtype="float32")
    assert_equal(model, prompt(9, batch=2, padded=True))
    assert len(replayed) >= 10
    assert all(replayed)


def test_steps_of_large_tensors_are_not_kept(monkeypatch, replayed):
    """Three captured steps of a long text would hold its keys as often."""
    monkeypatch.setattr(capture, "_MOST_BYTES", 1 << 10)
    assert_equal(accelerated("llama"), prompt(9))
    assert not replayed
