"""What cannot fit into memory is refused before a weight is read."""

from __future__ import annotations

import diffusers
import pytest
import torch
import transformers
from transformers import AutoModel, BertConfig, BertModel, MixtralConfig, MixtralForCausalLM

from hf_cpu_accel import explain
from hf_cpu_accel.config import CPUAccelConfig
from hf_cpu_accel.frontends import forecast as forecasts
from hf_cpu_accel.frontends.forecast import forecast, stored_tensors

pytestmark = pytest.mark.usefixtures("installed")

SIZES = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    BertModel(BertConfig(**SIZES, vocab_size=200)).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def limit(monkeypatch):
    return lambda nbytes: monkeypatch.setattr(forecasts, "available_memory", lambda: nbytes)


def _of(folder, dtype, cls=BertModel, **options):
    with torch.device("meta"):
        model = cls(transformers.AutoConfig.from_pretrained(folder))
    model = model.to(options.pop("weights", torch.bfloat16))
    files = [str(file) for file in folder.glob("*.safetensors")]
    return forecast(model, stored_tensors(files), CPUAccelConfig(dtype=dtype, **options), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_the_forecast_equals_the_packed_size(folder, dtype):
    model = BertModel.from_pretrained(folder, cpu_optimize=dtype)
    found = _of(folder, dtype)
    distinct = sum(packed_weight.nbytes for packed_weight in {m.packed for m in _groups(model)})
    assert 0.7 * distinct <= found.packed <= distinct  # the pooler is float32
    assert found.copied == found.unpacked == 0
    assert found.peak == found.packed


def _groups(model):
    return {module.group for module in model.modules() if hasattr(module, "group")}


def test_weights_that_are_cast_or_joined_are_copied(folder, tmp_path):
    found = _of(folder, "int8", weights=torch.float32)
    total = sum(value.numel() for value in BertModel.from_pretrained(folder).parameters())
    assert found.copied == 4 * total
    assert found.unpacked < found.copied
    assert found.peak == found.copied
    assert _of(folder, "int8", weights=torch.float32, originals="memory").peak == found.copied + found.packed
    config = MixtralConfig(**SIZES, num_key_value_heads=2, vocab_size=64, num_local_experts=4)
    model = MixtralForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    experts = sum(value.nbytes for value in model.parameters() if value.dim() == 3)
    assert _of(tmp_path, "int8", cls=MixtralForCausalLM).copied == experts


def test_skipped_modules_are_not_packed(folder):
    assert _of(folder, "int8", skip_modules=("encoder", "pooler")).packed == 0


@pytest.mark.parametrize("kind", [BertModel, AutoModel])
def test_models_that_cannot_fit_are_rejected(kind, folder, limit, monkeypatch):
    whole = _of(folder, "bfloat16").peak
    limit(whole - 1)
    monkeypatch.setattr(torch.nn.Module, "eval", lambda self: pytest.fail("it was loaded"))
    message = (
        r"loading BertModel with cpu_optimize needs at least 0\.8 MB .*packed as bfloat16.*but 0\.8 MB are available.*"
        r"No weights were loaded; dtypes that fit: dtype='int8' needs 0\.\d MB.*dtype='int4'"
    )
    with pytest.raises(MemoryError, match=message):
        kind.from_pretrained(folder, cpu_optimize="bfloat16")
    limit(10)
    with pytest.raises(MemoryError, match="no dtype fits"):
        kind.from_pretrained(folder, cpu_optimize="int8")


def test_models_that_fit_and_plain_models_are_loaded(folder, limit):
    limit(_of(folder, "int8").peak)
    assert explain(BertModel.from_pretrained(folder, cpu_optimize="int8")).dtype == "int8"
    limit(0)
    assert BertModel.from_pretrained(folder).dtype == torch.bfloat16


def test_a_pipeline_counts_all_its_models(limit, tmp_path):
    blocks = {"block_out_channels": (32,), "layers_per_block": 1, "norm_num_groups": 8}
    unet = diffusers.UNet2DModel(
        sample_size=8,
        down_block_types=("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",),
        **blocks,
    )
    vqvae = diffusers.VQModel(**blocks)
    diffusers.LDMPipeline(vqvae, unet, diffusers.DDIMScheduler()).save_pretrained(tmp_path)
    sizes = [forecast(model, None, CPUAccelConfig(), "int8").peak for model in (unet, vqvae)]
    assert all(sizes)
    limit(sum(sizes) - 1)
    with pytest.raises(MemoryError, match=r"cpu_optimize needs.* for the other models of the pipeline\)"):
        diffusers.LDMPipeline.from_pretrained(tmp_path, cpu_optimize="int8")
    limit(sum(sizes))
    pipe = diffusers.LDMPipeline.from_pretrained(tmp_path, cpu_optimize="int8")
    assert explain(pipe).dtype == "int8"


def test_a_forecast_reads_headers_only(folder):
    (file,) = folder.glob("*.safetensors")
    stored = stored_tensors([str(file)])
    assert stored[torch.bfloat16, (512, 128)] == 3  # one is the table of positions
    assert stored_tensors([str(folder / "config.json")]) is None
    assert forecasts.available_memory() > 0
