"""Steps that are replayed give what the model's own code gives, bit by bit, and stop where that would do something else."""

import copy

import pytest
import torch
from transformers import FalconH1Config, FalconH1ForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.generate.replay import capture, steps
from hf_cpu_accel.generate.replay.limits import Limits
from hf_cpu_accel.generate.replay.program import Program
from tests.generate.decoders import DECODERS, accelerated, build, eager, prompt

SETTINGS = {
    "do_sample": False,
    "max_new_tokens": 40,
    "min_new_tokens": 40,
    "eos_token_id": None,
    "pad_token_id": 0,
    "return_dict_in_generate": True,
    "output_scores": True,
}


@pytest.fixture
def replayed(monkeypatch):
    """One entry for each step that was replayed: whether it was as foreseen."""
    found = []
    run = Program.run

    def counted(self, inputs, step):
        logits = run(self, inputs, step)
        found.append(logits is not None)
        return logits

    monkeypatch.setattr(Program, "run", counted)
    return found


def generate(model, inputs, *, replay, **settings):
    with pytest.MonkeyPatch.context() as patch:
        if not replay:
            patch.setattr(steps, "_can_be_captured", lambda *_: False)
        return model.generate(**inputs, **{**SETTINGS, **settings})


def assert_equal(model, inputs, **settings):
    generate(
        model, inputs, replay=False, **settings
    )  # the first call of a model may be made by other providers
    expected = generate(model, inputs, replay=False, **settings)
    output = generate(model, inputs, replay=True, **settings)
    assert torch.equal(output.sequences, expected.sequences)
    assert len(output.scores) == len(expected.scores)
    assert all(map(torch.equal, output.scores, expected.scores))


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("name", DECODERS)
def test_scores_are_those_of_the_model(name, padded, replayed):
    assert_equal(accelerated(name), prompt(9, batch=3, padded=padded))
    assert len(replayed) >= 10
    assert all(replayed)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bart"])
def test_beams_that_change_places(name, replayed):
    settings = {"num_beams": 4, "num_return_sequences": 2, "no_repeat_ngram_size": 2}
    assert_equal(accelerated(name), prompt(9, batch=2), **settings)
    assert replayed.count(True) >= 20
    assert replayed.count(False) <= 1


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
def test_of_narrow_weights_and_caches(dtype, kv_cache, replayed):
    assert_equal(accelerated("llama", dtype, kv_cache), prompt(9), max_new_tokens=120)  # storages grow
    assert len(replayed) >= 100
    assert all(replayed)


def test_windows_that_move_on(replayed):
    assert_equal(accelerated("gemma2"), prompt(30), max_new_tokens=150)
    assert len(replayed) > 30


def test_a_conversation_goes_on(replayed):
    model = accelerated("qwen3")
    first = generate(model, prompt(9), replay=True)
    again = {"input_ids": torch.cat([first.sequences, prompt(5)["input_ids"]], dim=1)}
    expected = generate(model, again, replay=False, past_key_values=copy.deepcopy(first.past_key_values))
    output = generate(model, again, replay=True, past_key_values=first.past_key_values)
    assert torch.equal(output.sequences, expected.sequences)
    assert output.past_key_values.get_seq_length() == output.sequences.shape[1] - 1
    assert len(replayed) > 50


def test_the_cache_can_be_continued_by_eager():
    output = generate(accelerated("llama"), prompt(9), replay=True)
    last = output.sequences[:, -1:]
    with torch.no_grad():
        logits = eager("llama")(last, past_key_values=output.past_key_values).logits
        expected = eager("llama")(output.sequences).logits[:, -1:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


class Once(LogitsProcessor):
    """Calls `action` when there are so many tokens."""

    def __init__(self, tokens, action):
        self.tokens, self.action = tokens, action

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == self.tokens:
            self.action()
        return scores


def test_hooks_that_come_meanwhile_are_called(replayed):
    model, called, handles = accelerated("llama"), [], []

    def register():
        hook = model.model.layers[0].register_forward_hook(lambda *_: called.append(1))
        handles.append(hook)

    generate(model, prompt(9), replay=True, logits_processor=LogitsProcessorList([Once(30, register)]))
    handles[0].remove()
    assert len(replayed) in range(5, 20)
    assert len(called) == 9 + 40 - 31


def test_no_steps_of_a_watched_model_are_replayed(replayed):
    model, called = accelerated("llama"), []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: called.append(1))
    generate(model, prompt(9), replay=True)
    handle.remove()
    assert not replayed
    assert len(called) == 40


def test_weights_that_are_written_to_meanwhile_count(replayed):
    outputs = []
    for replay in (False, True):
        model = accelerate_for_cpu(build("llama"))
        norm = model.model.layers[0].input_layernorm.weight

        def write(norm=norm):
            norm.data.mul_(-1.5)

        processors = LogitsProcessorList([Once(30, write)])
        outputs.append(generate(model, prompt(9), replay=replay, logits_processor=processors))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert replayed.count(False) == 1
    assert replayed[-1]


def test_a_cache_that_is_taken_back_meanwhile_counts(replayed):
    outputs = []
    for replay in (False, True):
        model = accelerated("llama")
        cache = generate(model, prompt(9), replay=False, max_new_tokens=1, min_new_tokens=1).past_key_values
        processors = LogitsProcessorList([Once(30, lambda cache=cache: cache.crop(-3))])
        given = {"input_ids": torch.cat([prompt(9)["input_ids"], prompt(3)["input_ids"]], dim=1)}
        outputs.append(
            generate(model, given, replay=replay, past_key_values=cache, logits_processor=processors)
        )
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert replayed.count(False) == 1


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


def falcon_h1():
    torch.manual_seed(0)
    config = FalconH1Config(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        mamba_d_ssm=128,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
    )
    return FalconH1ForCausalLM(config).eval()


def test_steps_of_large_tensors_are_not_kept(monkeypatch, replayed):
    """Three captured steps of a long text would hold its keys as often."""
    monkeypatch.setattr(capture, "_MOST_BYTES", 1 << 10)
    assert_equal(accelerated("llama"), prompt(9))
    assert not replayed
