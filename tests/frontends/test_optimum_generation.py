"""The Optimum-style classes that generate: the tokens of transformers, by our loops, with all that `generate` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

from hf_cpu_accel import CPUModelForCausalLM, CPUModelForSeq2SeqLM, CPUModelForSpeechSeq2Seq
from hf_cpu_accel.generate import hook
from tests.frontends.packed import packed_cases

CASES = {"llama": CPUModelForCausalLM, "t5": CPUModelForSeq2SeqLM, "whisper": CPUModelForSpeechSeq2Seq}
GREEDY = {"max_new_tokens": 9, "do_sample": False}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any, dict[str, Any]]]:
    """name -> (folder, the plain model, its inputs for `generate`)."""
    found = {}
    for name in CASES:
        torch.manual_seed(0)
        model, inputs, _ = packed_cases.MODELS[name]()
        inputs.pop("decoder_input_ids", None)
        folder = tmp_path_factory.mktemp(name)
        model.eval().save_pretrained(folder)
        found[name] = (folder, model, inputs)
    return found


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those of ours that ran."""
    ran: list[str] = []

    def counting(name: str) -> Any:
        loop = getattr(hook, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            ran.append(name)
            return loop(*args, **kwargs)

        return counted

    for name in ("decode", "beam_search"):
        monkeypatch.setattr(hook, name, counting(name))
    return ran


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", [GREEDY, {**GREEDY, "num_beams": 3}], ids=["greedy", "beams"])
def test_tokens_equal_those_of_transformers(
    name: str, options: dict[str, Any], saved: Any, loops: list[str]
) -> None:
    folder, plain, inputs = saved[name]
    model = CASES[name].from_pretrained(folder, cpu_optimize="float32")
    assert model.can_generate()
    expected = plain.generate(**inputs, **options)
    loops.clear()
    assert torch.equal(model.generate(**inputs, **options), expected)
    assert loops == ["beam_search" if "num_beams" in options else "decode"]


class _Recorder(transformers.generation.streamers.BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_streamers_get_each_token(saved: Any, loops: list[str]) -> None:
    folder, _, inputs = saved["llama"]
    model, streamer = CPUModelForCausalLM.from_pretrained(folder, cpu_optimize="int8"), _Recorder()
    tokens = model.generate(inputs["input_ids"][:1], streamer=streamer, **GREEDY)
    assert streamer.tokens == tokens[0].tolist()
    assert streamer.ended
    assert loops == ["decode"]


def test_the_generation_config_is_the_models(saved: Any, tmp_path: Path) -> None:
    folder, _, inputs = saved["llama"]
    model = CPUModelForCausalLM.from_pretrained(folder, cpu_optimize="float32")
    model.generation_config = GenerationConfig(max_new_tokens=4, do_sample=False)
    assert model.model.generation_config is model.generation_config
    assert model.generate(**inputs).shape[1] == inputs["input_ids"].shape[1] + 4
    model.save_pretrained(tmp_path)
    assert CPUModelForCausalLM.from_pretrained(tmp_path).generation_config.max_new_tokens == 4


def test_use_cache(saved: Any) -> None:
    folder, plain, inputs = saved["llama"]
    with_cache = CPUModelForCausalLM.from_pretrained(folder, cpu_optimize="float32")
    without = CPUModelForCausalLM.from_pretrained(folder, use_cache=False, cpu_optimize="float32")
    assert (with_cache.use_cache, without.use_cache) == (True, False)
    expected = plain.generate(**inputs, **GREEDY)
    assert torch.equal(without.generate(**inputs, **GREEDY), expected)
    answer = without.generate(**inputs, **GREEDY, return_dict_in_generate=True)
    assert answer.past_key_values is None


def test_assistants_may_be_accelerated(saved: Any) -> None:
    folder, plain, inputs = saved["llama"]
    model, assistant = (CPUModelForCausalLM.from_pretrained(folder, cpu_optimize="float32") for _ in range(2))
    prompt = inputs["input_ids"][:1]
    expected = plain.generate(prompt, **GREEDY)
    assert torch.equal(model.generate(prompt, assistant_model=assistant, **GREEDY), expected)
