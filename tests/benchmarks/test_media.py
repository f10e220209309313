"""Models of images, sound and diffusion: their sizes, and tiny ones through a worker and a rival's environment."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import worker, workloads
from benchmarks.peers import cases, conversion
from benchmarks.peers.model import SavedModel
from benchmarks.workloads import media

# Millions of parameters, and the shape of the answer for a batch of two.
_SIZES = {
    "vit-base": (85.8, (2, 197, 768)),
    "clip-vit-b32": (87.5, (2, 50, 768)),
    "swin-t": (27.5, (2, 49, 768)),
    "resnet-50": (23.5, (2, 2048, 7, 7)),
    "convnext-t": (27.8, (2, 768, 7, 7)),
    "levit-128": (8.4, (2, 16, 384)),
    "regnet-y-040": (19.6, (2, 1088, 7, 7)),
    "poolformer-s12": (11.4, (2, 512, 7, 7)),
    "whisper-base-encoder": (20.6, (2, 1500, 512)),
    "wav2vec2-base": (94.4, (2, 249, 768)),
    "sd15-unet": (859.5, (2, 4, 64, 64)),
    "sd15-vae-decoder": (83.7, (2, 3, 512, 512)),
    "flux-mini": (81.8, (2, 1024, 64)),
    "gliner-base": (193.7, (2, 128, 96)),
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`vit-base`, `sd15-unet` and `sd15-vae-decoder` as small as can be."""
    from diffusers import UNet2DConditionModel
    from transformers import ViTConfig, ViTModel

    from benchmarks.vae_decoder import VaeDecoder

    vit = ViTConfig(
        image_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    unet = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
    unet |= {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
    unet |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}

    def noise(batch: int, generator: torch.Generator) -> dict[str, Tensor]:
        inputs = {
            "sample": torch.randn(batch, 4, 8, 8, generator=generator),
            "encoder_hidden_states": torch.randn(batch, 3, 12, generator=generator),
        }
        return {**inputs, "timestep": torch.full((batch,), 501)}

    def latents(batch: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {"latents": torch.randn(batch, 4, 4, 4, generator=generator)}

    def pixels(batch: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=generator)}

    small = {
        "vit-base": (lambda: ViTModel(vit, add_pooling_layer=False), pixels),
        "sd15-unet": (
            lambda: UNet2DConditionModel(sample_size=8, cross_attention_dim=12, attention_head_dim=2, **unet),
            noise,
        ),
        "sd15-vae-decoder": (lambda: VaeDecoder(block_out_channels=(8,), norm_num_groups=4), latents),
    }
    monkeypatch.setattr(media, "_MODELS", small)
    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(tmp_path))


@pytest.mark.parametrize("name", [name for name in media.NAMES if name in _SIZES])
def test_they_are_of_the_published_sizes(name: str) -> None:
    workload = workloads.parse(f"{name}:2")
    with torch.device("meta"):
        model = workload.build()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    inputs = workload.inputs(model)
    assert {len(tensor) for key, tensor in inputs.items() if not key.endswith("_ids")} == {2}
    with torch.device("meta"):
        (output,) = workload.forward(model, {key: tensor.to("meta") for key, tensor in inputs.items()})
    assert (round(parameters / 1e6, 1), tuple(output.shape)) == _SIZES[name]


def test_weights_and_inputs_are_the_same_everywhere(tiny: None) -> None:
    workload = workloads.parse("vit-base:1")
    first, second = workload.build(), workload.build()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    images = [workload.inputs(first, seed)["pixel_values"] for seed in (0, 0, 1)]
    assert torch.equal(images[0], images[1])
    assert not torch.equal(images[0], images[2])


def test_rows_of_maps_are_their_longer_side() -> None:
    tokens, image, features = torch.randn(1, 5, 8), torch.randn(2, 3, 4, 4), torch.randn(2, 9, 2, 2)
    rows = workloads.parse("vit-base:1").real_tokens([tokens, image, features])
    assert rows[0] is tokens
    assert torch.equal(rows[1][1, 2], image[1, 2].flatten())
    assert torch.equal(rows[2][1, 2], features[1, :, 1, 0])


@pytest.mark.parametrize("name", ["vit-base:2", "sd15-unet:2", "sd15-vae-decoder:1"])
def test_a_rival_gets_the_very_model_and_inputs(tiny: None, name: str) -> None:
    workload, case = workloads.parse(name), cases.folder(name)
    model = workload.build()
    measured = workload.inputs(model)
    given = conversion.inputs(case)
    assert {key: array.tolist() for key, array in given.items()} == {
        key: tensor.tolist() for key, tensor in measured.items()
    }
    with torch.inference_mode():
        output = SavedModel(case)(*(torch.from_numpy(array) for array in given.values()))
    assert torch.equal(output, workload.forward(model, measured)[0])
    for batch in conversion.calibration(case):
        assert [array.shape for array in batch.values()] == [array.shape for array in given.values()]
        first = next(iter(given))
        assert batch[first].tolist() != given[first].tolist()


@pytest.mark.parametrize("name", ["vit-base:1", "sd15-unet:2", "sd15-vae-decoder:1"])
def test_every_system_runs_them(tiny: None, name: str) -> None:
    threads = str(torch.get_num_threads())
    (expected,) = worker.prepare(name, "eager-fp32", threads).outputs
    for system in ("eager-bf16", "ours-fp32", "ours-int8"):
        (output,) = worker.prepare(name, system, threads).outputs
        error = abs(output - expected).max() / abs(expected).max()
        assert error < (1e-5 if system == "ours-fp32" else 0.1), system
