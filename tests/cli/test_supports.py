"""`hf-cpu-accel supports`: what it says of a config is what becomes of the model."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from torch import nn
from typer.testing import CliRunner

from hf_cpu_accel import CPUAccelConfig
from hf_cpu_accel.cli.main import app
from hf_cpu_accel.cli.supports import shallow as shallows
from hf_cpu_accel.cli.supports.command import inspect, verdict
from hf_cpu_accel.cli.supports.layers import Layers, members
from hf_cpu_accel.cli.supports.shallow import shallow

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 12}
PLENTY = 1 << 30


def config(model_type, **fields):
    return transformers.AutoConfig.for_model(model_type, **{**SMALL, "vocab_size": 99, **fields})


def asked(*arguments):
    return CliRunner().invoke(app, ["supports", *map(str, arguments)])


def test_an_encoder_is_fused_and_the_table_shows_its_depth(tmp_path):
    config("bert").save_pretrained(tmp_path)
    result = asked(tmp_path, "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert "BertModel (bert), float32" in result.output
    assert "Every layer runs as one call." in result.output
    (row,) = [line for line in result.output.splitlines() if "BertLayer" in line]
    assert row.split() == ["encoder.layer", "12", "BertLayer", "encoder", "layer"]


def test_a_config_file_and_json(tmp_path):
    config("qwen3", head_dim=16, num_key_value_heads=2, architectures=["Qwen3ForCausalLM"]).save_pretrained(
        tmp_path
    )
    result = asked(tmp_path / "config.json", "--dtype", "int8", "--json")
    report = json.loads(result.stdout)
    assert report["class"] == "Qwen3ForCausalLM"
    assert (report["dtype"], report["depths"]) == ("int8", {"model.layers": 12})
    assert [row["runs_as"] for row in report["layers"]] == ["decoder layer"]


def test_a_layer_that_is_not_fused_has_a_reason():
    result = inspect(config("bert", hidden_act="mish"), CPUAccelConfig(dtype="float32"))
    (row,) = result["layers"]
    assert (row.kind, row.count, row.runs_as) == ("BertLayer", 2, None)
    assert len(row.reasons) == 1
    assert verdict([row]).startswith("No layer runs as one call")


def test_each_kind_of_layer_is_built():
    made = shallow(config("gemma3_text", head_dim=16, num_key_value_heads=2), PLENTY)
    assert made.depths == {"layers": 12}
    assert made.model.config.layer_types == [*["sliding_attention"] * 5, "full_attention"]
    assert len(made.model.layers) == 6


def test_vocabulary_and_experts_are_cut_and_ids_stay_distinct():
    given = config(
        "mixtral",
        num_key_value_heads=2,
        num_local_experts=64,
        vocab_size=50000,
        bos_token_id=49998,
        eos_token_id=[49999, 3],
    )
    made = shallow(given, PLENTY).model.config
    assert (made.vocab_size, made.num_local_experts) == (4096, 16)
    assert made.eos_token_id[1] == 3
    assert len({made.bos_token_id, *made.eos_token_id}) == 3
    assert max(made.bos_token_id, *made.eos_token_id) < 4096


def test_groups_of_experts_stay_whole():
    fields = shallows._cut({"n_routed_experts": 256, "n_group": 8, "num_experts_per_tok": 8}, 2, [])
    assert fields == {"n_routed_experts": 16, "n_group": 8, "num_experts_per_tok": 8}


def test_large_models_are_rejected_with_their_size():
    with pytest.raises(
        ValueError, match=r"2 layers that contain each kind take 0\.\d GB, but only 0\.0 GB may be used"
    ):
        shallow(config("bert", hidden_size=1024, intermediate_size=4096), 1 << 20)


def test_wide_models_are_built_in_bfloat16():
    given = config("bert", hidden_size=256, intermediate_size=1024)
    size = sum(parameter.nbytes for parameter in shallow(given, PLENTY).model.parameters())
    assert {p.dtype for p in shallow(given, int(0.7 * size)).model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"model_index.json": {}}, "it is a diffusers pipeline"),
        ({"config.json": {}}, "Should have a `model_type` key"),
        ({"config.json": {"model_type": "bert", "num_attention_heads": 7}}, "transformers builds no model"),
    ],
)
def test_unsupported_files(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    result = asked(tmp_path)
    assert result.exit_code == 1
    assert message in result.output


def test_a_missing_model(tmp_path):
    result = asked(tmp_path / "missing")
    assert result.exit_code == 1
    assert "Without a network, pass a local folder." in result.output


def test_an_unknown_dtype():
    result = asked("bert", "--dtype", "int7")
    assert result.exit_code == 2
    assert "int7" in result.output


def test_members_are_layers_instead_of_their_parts():
    model = nn.Module()
    linears = lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))  # noqa: E731
    layer, stage = nn.Module(), nn.Module()
    layer.parts = nn.ModuleList([linears(), nn.LayerNorm(8)])
    stage.blocks = nn.ModuleList([linears(), linears()])
    model.layers, model.stages = nn.ModuleList([layer]), nn.ModuleList([stage])
    model.small = nn.ModuleList([nn.Linear(8, 8)])
    assert members(model) == {
        "layers.0": "Module",
        "stages.0.blocks.0": "Sequential",
        "stages.0.blocks.1": "Sequential",
    }


def test_verdicts():
    fused, separate = Layers("a", "A", 1, "encoder layer", ()), Layers("b", "B", 1, None, ("why",))
    assert verdict([]).startswith("The model has no transformer layers")
    assert verdict([fused, separate]).startswith("Some layers run as one call")
