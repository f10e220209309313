"""`generate` of an accelerated model: which code runs, for that model only, and restored."""

import copy
import inspect
import pickle
import sys
import threading

import pytest
import torch
import transformers
from transformers import DynamicCache, GenerationMixin, StaticCache

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.generate import hook
from hf_cpu_accel.generate.cache import CPUCache
from hf_cpu_accel.generate.hook import Generate
from hf_cpu_accel.generate.inputs import CACHE
from tests.generate.decoders import PAD, accelerated, build, eager, generation_items, prompt

GREEDY = {"do_sample": False, "max_new_tokens": 8}


def test_signature_and_documentation_are_those_of_transformers():
    model, stock = accelerated("llama"), eager("llama")
    assert inspect.signature(model.generate) == inspect.signature(stock.generate)
    assert model.generate.__doc__ == stock.generate.__doc__
    assert model.generate.__name__ == "generate"
    assert inspect.signature(model.prepare_inputs_for_generation) == inspect.signature(
        stock.prepare_inputs_for_generation
    )


def test_the_plan_says_who_runs_what():
    items = generation_items(accelerated("llama"))
    assert items["KV cache"].op == "cache"
    assert items["greedy search and sampling"].op == "decode"
    assert items["beam search"].op == "beam_search"
    assert items["speculative decoding"].op == "speculative_decode"
    assert "the loop of transformers" in items["other decoding"].reason
    assert "encoder" in generation_items(accelerated("t5"))["speculative decoding"].reason
    assert "generate" in str(explain(accelerated("llama")))
    assert generation_items(accelerate_for_cpu(build("llama").model, dtype="float32")) == {}


def test_restore_gives_the_methods_back():
    model = build("llama")
    inputs = prompt(6)
    before, attributes = model.generate(**inputs, **GREEDY), sorted(vars(model))
    accelerate_for_cpu(model, dtype="float32")
    assert isinstance(model.generate, Generate)
    restore(model)
    assert sorted(vars(model)) == attributes
    assert model.generate.__func__ is GenerationMixin.generate
    output = model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
    assert torch.equal(output.sequences, before)
    assert type(output.past_key_values) is DynamicCache


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_generate_with_their_own_weights(duplicate, loops):
    model = accelerate_for_cpu(build("llama"), dtype="float32")
    inputs = prompt(6)
    expected = model.generate(**inputs, **GREEDY)
    twin = duplicate(model)
    assert twin.generate.model is twin
    assert twin.prepare_inputs_for_generation.model is twin
    restore(model)
    assert torch.equal(twin.generate(**inputs, **GREEDY), expected)
    assert len(loops) == 2
    restore(twin)
    assert "generate" not in vars(twin)
    assert torch.equal(twin.generate(**inputs, **GREEDY), expected)


def test_a_generate_that_other_code_replaced_is_left_alone():
    model = build("llama")
    model.generate = lambda *args, **kwargs: "theirs"
    accelerate_for_cpu(model, dtype="float32")
    assert "its generate is already replaced" in generation_items(model)["greedy search and sampling"].reason
    assert model.generate() == "theirs"
    assert restore(model).generate() == "theirs"


def test_skipped_parts_keep_their_generate():
    class Wrapper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.text = build("llama")
            self.other = build("gpt2")

    model = accelerate_for_cpu(Wrapper().eval(), dtype="float32", skip_modules=("other",))
    assert "generate" in vars(model.text)
    assert "generate" not in vars(model.other)
    assert [item.name for item in explain(model).items if item.op == "decode"] == ["text.generate"]


def own(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
    return kwargs[CACHE]


def test_the_users_choices_win(loops):
    model, inputs = accelerated("llama"), prompt(6)
    assert type(model.generate(**inputs, **GREEDY, custom_generate=own)) is DynamicCache
    assert loops == []
    asked = {**GREEDY, "return_dict_in_generate": True}
    for implementation, kind in (("dynamic", DynamicCache), ("static", StaticCache)):
        output = model.generate(**inputs, **asked, cache_implementation=implementation)
        assert type(output.past_key_values) is kind
    assert model.generate(**inputs, **asked, use_cache=False).past_key_values is None
    assert loops == []
    model.generate(**inputs, **GREEDY, custom_generate=None, past_key_values=None)
    assert loops == [6]
    loops.clear()
    theirs = DynamicCache(config=model.config)
    assert model.generate(**inputs, **asked, past_key_values=theirs).past_key_values is theirs
    assert theirs.get_seq_length() == 13
    assert loops == [6]


def test_a_setting_of_the_model_is_a_choice_too(loops):
    model, inputs = accelerate_for_cpu(build("llama"), dtype="float32"), prompt(6)
    model.generation_config.use_cache = False
    assert model.generate(**inputs, **GREEDY, return_dict_in_generate=True).past_key_values is None
    model.generation_config.use_cache = True
    model.generation_config.cache_implementation = "dynamic"
    model.generate(**inputs, **GREEDY)
    assert loops == []
    model.generation_config.cache_implementation = None
    model.generate(**inputs, **GREEDY)
    assert loops == [6]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_conversation_goes_on_with_the_cache_of_before(name, whole, loops):
    """The whole conversation is passed again, or only the new tokens with a mask over all."""
    histories = []
    for model in (eager(name), accelerated(name)):
        sequence, cache = prompt(9)["input_ids"], None
        for turn in range(3):
            mask = torch.ones_like(sequence)
            new = sequence if whole or cache is None else sequence[:, cache.get_seq_length() :]
            output = model.generate(
                input_ids=new,
                attention_mask=mask,
                past_key_values=cache,
                **GREEDY,
                return_dict_in_generate=True,
            )
            answer = output.sequences[:, new.shape[1] :]
            cache = output.past_key_values
            sequence = torch.cat([sequence, answer, prompt(4, seed=turn)["input_ids"]], dim=1)
        assert cache.get_seq_length() == sequence.shape[1] - 5
        histories.append(sequence.tolist())
    assert type(cache) is CPUCache
    assert histories[0] == histories[1]
    assert len(loops) == 3


def test_a_prefix_is_computed_once(loops):
    model, prefix = accelerated("llama"), prompt(12)["input_ids"]
    with torch.no_grad():
        cache = model(prefix, past_key_values=CPUCache(model.config), use_cache=True).past_key_values
    for seed in range(3):
        ids = torch.cat([prefix, prompt(5, seed=seed)["input_ids"]], dim=1)
        mask = torch.ones_like(ids)
        tokens = model.generate(ids, attention_mask=mask, past_key_values=copy.deepcopy(cache), **GREEDY)
        assert torch.equal(tokens, eager("llama").generate(ids, attention_mask=mask, **GREEDY))
    assert cache.get_seq_length() == 12
    assert len(loops) == 3


def test_other_versions_of_transformers_keep_their_own(monkeypatch):
    inputs = prompt(6)
    expected = eager("llama").generate(**inputs, **GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(hook.inspect, "isabstract", lambda kind: True)  # a cache layer has to do more there
        model = accelerate_for_cpu(build("llama"), dtype="float32")
    assert "this version" in generation_items(model)["KV cache"].reason
    assert torch.equal(model.generate(**inputs, **GREEDY), expected)
    monkeypatch.setitem(sys.modules, "hf_cpu_accel.generate.hook", None)  # an import of ours fails there
    model = accelerate_for_cpu(build("llama"), dtype="float32")
    assert "of transformers" in generation_items(model)["generate"].reason
    assert torch.equal(model.generate(**inputs, **GREEDY), expected)


def test_threads_generate_side_by_side():
    model, results = accelerated("llama"), {}
    prompts = [prompt(5 + seed, seed=seed) for seed in range(4)]
    expected = [model.generate(**inputs, **GREEDY) for inputs in prompts]

    def work(index):
        settings = {"num_beams": 2} if index % 2 else {}
        model.generate(**prompts[index], **GREEDY, **settings)
        results[index] = model.generate(**prompts[index], **GREEDY)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[index], expected[index]) for index in range(4))


def test_a_model_with_other_state_keeps_transformers_cache(loops):
    settings = {"vocab_size": 260, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                "intermediate_size": 96, "pad_token_id": PAD, "eos_token_id": 1}  # fmt: skip
    config = transformers.Lfm2Config(
        **settings, num_key_value_heads=2, layer_types=["conv", "full_attention"]
    )
    torch.manual_seed(0)
    model = transformers.Lfm2ForCausalLM(config).eval()
    inputs = prompt(6)
    expected = model.generate(**inputs, **GREEDY)
    accelerate_for_cpu(model, dtype="float32")
    reason = generation_items(model)["KV cache"].reason
    assert "the cache of transformers" in reason
    assert "LinearAttentionLayer" in reason
    output = model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert type(output.past_key_values) is DynamicCache
    assert loops == [6]


@pytest.mark.parametrize("kind", ["RecurrentGemma", "Rwkv"])
def test_models_that_remember_in_another_way(kind):
    """One keeps its state to itself, one returns it under another name."""
    settings = {"vocab_size": 260, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96,
                "pad_token_id": PAD, "eos_token_id": 1, "bos_token_id": 2}  # fmt: skip
    if kind == "RecurrentGemma":
        settings |= {"num_attention_heads": 4, "lru_width": 64}
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**settings)
    ).eval()
    inputs = prompt(6)
    expected = model.generate(**inputs, **GREEDY)
    accelerate_for_cpu(model, dtype="float32")
    assert generation_items(model)["KV cache"].reason is not None
    assert torch.equal(model.generate(**inputs, **GREEDY), expected)
