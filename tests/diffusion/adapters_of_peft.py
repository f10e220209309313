"""LoRA adapters of peft in accelerated pipelines, in any order.

Not in the suite, which lacks peft: `make test-diffusers` runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from tests.hosts.diffusion_pipelines import stable_diffusion

BOTH = ["text_encoder", "unet"]


def _add(pipe: Any, name: str, seed: int) -> None:
    torch.manual_seed(seed)
    options: dict[str, Any] = {"r": 4, "lora_alpha": 4, "init_lora_weights": False}
    of_unet = ["to_q", "to_k", "to_v", "to_out.0", "conv1", "net.0.proj"]
    pipe.unet.add_adapter(LoraConfig(target_modules=of_unet, **options), name)
    pipe.text_encoder.add_adapter(LoraConfig(target_modules=["q_proj", "v_proj"], **options), name)


def _load(pipe: Any) -> None:
    """As from the hub; diffusers leaves its layers in training mode."""
    torch.manual_seed(3)
    other, _ = stable_diffusion()
    other.unet.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "to_out.0"]))
    layers = convert_state_dict_to_diffusers(get_peft_model_state_dict(other.unet))
    with TemporaryDirectory() as folder:
        pipe.save_lora_weights(folder, unet_lora_layers=layers)
        pipe.load_lora_weights(folder, adapter_name="c")


STEPS: tuple[tuple[str, Callable[[Any], object]], ...] = (
    ("nothing", lambda pipe: None),
    ("add a", lambda pipe: _add(pipe, "a", 1)),
    ("add b", lambda pipe: _add(pipe, "b", 2)),
    ("both", lambda pipe: pipe.set_adapters(["a", "b"], [0.5, 0.7])),
    ("fuse", lambda pipe: pipe.fuse_lora(components=BOTH)),
    ("unfuse", lambda pipe: pipe.unfuse_lora(components=BOTH)),
    ("only a", lambda pipe: pipe.set_adapters("a", 0.3)),
    ("fuse the UNet", lambda pipe: pipe.fuse_lora(components=["unet"], lora_scale=0.8)),
    ("disable while fused", lambda pipe: pipe.disable_lora()),
    ("enable", lambda pipe: pipe.enable_lora()),
    ("fuse the UNet again", lambda pipe: pipe.fuse_lora(components=["unet"], lora_scale=0.8)),
    ("unfuse the UNet", lambda pipe: pipe.unfuse_lora(components=["unet"])),
    ("disable", lambda pipe: pipe.disable_lora()),
    ("enable again", lambda pipe: pipe.enable_lora()),
    ("delete a", lambda pipe: pipe.delete_adapters("a")),
    ("only b", lambda pipe: pipe.set_adapters("b")),
    ("fuse b", lambda pipe: pipe.fuse_lora(components=BOTH)),
    ("unfuse b", lambda pipe: pipe.unfuse_lora(components=BOTH)),
    ("load c", _load),
    ("all", lambda pipe: pipe.set_adapters(["b", "c"], [0.5, 1.0])),
    ("fuse c", lambda pipe: pipe.fuse_lora(components=["unet"], adapter_names=["c"])),
    ("unfuse c", lambda pipe: pipe.unfuse_lora(components=["unet"])),
    ("unload", lambda pipe: pipe.unload_lora_weights()),
    ("load c again", _load),
    ("fuse c again", lambda pipe: pipe.fuse_lora(components=["unet"])),
)


def _drawn(accelerated_before: int | None) -> list[np.ndarray]:
    """The images after each step, and after `restore` at the end."""
    torch.manual_seed(0)
    pipe, call = stable_diffusion()
    images = []
    for number, (_, step) in enumerate(STEPS):
        if number == accelerated_before:
            accelerate_for_cpu(pipe, dtype="float32", threads=1)
        step(pipe)
        images.append(call())
    assert bool(explain(pipe).replaced) == (accelerated_before is not None)
    restore(pipe)
    return [*images, call()]


@pytest.fixture(scope="module")
def expected() -> list[np.ndarray]:
    return _drawn(None)


@pytest.mark.parametrize("first", [0, 3, 5, 8, 10, 24])
def test_the_images_are_those_of_the_original(first: int, expected: list[np.ndarray]) -> None:
    assert np.abs(expected[4] - expected[0]).max() > 0.01
    images = _drawn(first)
    for (name, _), ours, theirs in zip((*STEPS, ("restore", None)), images, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4, err_msg=name)
    np.testing.assert_array_equal(images[-1], expected[-1])
