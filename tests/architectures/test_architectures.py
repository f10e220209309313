"""The oddest model types of the sweep (`make test-architectures`), in float32 and int8, and what the sweep is made of."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import InstructBlipModel, MusicgenModel

from hf_cpu_accel.generate.cache_layer import CPUCacheLayer
from tests.architectures import check as checks
from tests.architectures import sweep
from tests.architectures.check import check
from tests.architectures.generating import generation_problems
from tests.architectures.inputs import Maker, padded
from tests.architectures.models import build
from tests.architectures.page import summary, write_page
from tests.architectures.small import small_configs

# Poolers that read padding, capped scores, sparse attention, states instead of attention, tuples, several towers, weights in their
# own strides, experts, windows, sounds, series, images.
ODD = (
    "altclip_text_model", "afmoe", "apertus", "autoformer", "axk2", "ctrl", "bert", "blt_patcher", "clip", "convbert",
    "cpmant", "convnext", "deberta", "deepseek_v32", "deepseek_v4", "deit", "falcon_mamba", "albert", "gpt2", "gpt_oss",
    "mpnet", "qwen2_vl", "resnet", "rwkv", "sew-d", "siglip_text_model", "mamba", "t5", "videoprism_text_model", "wav2vec2",
)  # fmt: skip


@pytest.mark.parametrize("model_type", ODD)
def test_it_is_right(model_type: str) -> None:
    torch.set_num_threads(1)
    result = check(model_type, ("float32", "int8"), generates=False)
    assert result["status"] == "right", result


# Weights rescaled by the first call, attention weights of keys in a cache, outputs without the cache, states alone, two caches.
@pytest.mark.parametrize("model_type", ["rwkv", "roformer", "bert", "mamba", "bart"])
def test_text_is_that_of_eager(model_type: str) -> None:
    torch.set_num_threads(1)
    assert generation_problems(model_type, dict(small_configs(model_type))["fixed"]) == []


def test_another_text_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = CPUCacheLayer.advance
    monkeypatch.setattr(CPUCacheLayer, "advance", lambda self, tokens: advance(self, max(0, tokens - 1)))
    assert generation_problems("llama", dict(small_configs("llama"))["fixed"])


def test_a_wrong_answer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that says something else after it was accelerated."""
    accelerate = checks.accelerate_for_cpu

    def badly(model: nn.Module, **options: Any) -> Any:
        accelerate(model, **options)
        norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm)]
        for norm in norms:
            norm.bias.data += 0.5
        return model

    monkeypatch.setattr(checks, "accelerate_for_cpu", badly)
    result = check("bert", ("float32",))
    assert result["status"] == "wrong"
    assert any("off by" in problem for problem in result["problems"])
    assert any("not restored" in problem for problem in result["problems"])


def test_every_recipe_of_a_config_is_small() -> None:
    recipes = dict(small_configs("llama"))
    assert recipes["fixed"].hidden_size == 64
    assert recipes["fixed"].num_hidden_layers == 2
    assert recipes["eight layers"].num_hidden_layers == 8
    assert recipes["an 8th"].hidden_size == 4096 // 8
    assert all(config.vocab_size == 200 for name, config in recipes.items() if name != "own")


def test_inputs_of_an_exception_come_first() -> None:
    """Ids with those of the image, images, and a text for the queries."""
    config = dict(small_configs("instructblip"))["fixed"]
    batch = next(Maker(build(InstructBlipModel, config)).batches())
    assert list(batch) == ["pixel_values", "qformer_input_ids", "input_ids"]
    assert (batch["input_ids"] == config.image_token_index).sum(1).tolist() == [4, 4]


def test_rows_of_codebooks_are_not_padded() -> None:
    """Four rows of ids stand for one text: a mask has no such rows."""
    model = build(MusicgenModel, dict(small_configs("musicgen_decoder"))["fixed"])
    batch = next(Maker(model).batches())
    assert len(batch["input_ids"]) == 4 * len(batch["encoder_hidden_states"])
    assert padded(batch, model) == {}


def test_an_error_of_a_child_process_is_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "architectures.json"
    right = {"type": "a", "status": "right", "problems": []}
    lines = [{"name": "a", "result": right}, {"name": "b", "error": "the process ended with -11"}]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = sweep.results(file)
    assert found["b"]["status"] == "wrong"
    assert "2 tested, 1 passed, 1 failed" in summary(list(found.values()))


def test_the_page_has_a_row_for_each_type(tmp_path: Path) -> None:
    results = [
        check("bert", ("float32",)),
        {"type": "odd", "status": "not run", "reason": "a | <b>", "problems": []},
    ]
    write_page(results, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "| bert | BertModel |" in text
    assert "| odd | a / (b) |" in text
    assert "2 types: 1 tested, 1 passed, 0 failed" in text
    assert "1 types have transformer layers. All layers run as a whole in 1 types (100 %), none in 0" in text


def test_the_page_says_how_many_rows_are_whole() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text()
    counts = [tuple(map(int, pair)) for pair in re.findall(r"\| (\d+)/(\d+) \|", text)]
    whole, none = sum(one == all_ for one, all_ in counts), sum(not one for one, _ in counts)
    share = f"All layers run as a whole in {whole} types ({100 * whole / len(counts):.0f} %), none in {none}"
    assert f"{len(counts)} types have transformer layers. {share}." in text
    assert len(counts) > 500


@pytest.mark.parametrize(
    ("model_type", "kinds", "whole"), [("bert", 1, True), ("resnet", 0, True), ("lilt", 1, False)]
)
def test_layers_are_those_in_which_attention_is_computed(model_type: str, kinds: int, whole: bool) -> None:
    result = check(model_type, ("float32",))
    assert len(set(result.get("layers", {}).values())) == kinds
    told = result["dtypes"]["float32"]["layers"] if kinds else {}
    assert all(reason is None for reason in told.values()) == whole
