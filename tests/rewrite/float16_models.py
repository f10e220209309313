"""Small models with float16 weights: for text, text to text, audio and images, with calls of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import Tensor, nn

_BERT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 300,
}
_VIT = {**_BERT, "image_size": 32, "patch_size": 8}
_OPT = {
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 128,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "init_std": 0.2,
}
_WHISPER = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 300,
    "max_source_positions": 50,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "num_mel_bins": 16,
    "init_std": 0.2,
}
_T5 = {"d_model": 64, "d_kv": 16, "num_layers": 2, "num_heads": 4, "d_ff": 128, "vocab_size": 300}
_RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic"}
_CLIP = {"text_config": {**_BERT, "eos_token_id": 2, "bos_token_id": 1}, "vision_config": _VIT}
_UNET = {
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "sample_size": 16,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 32,
    "norm_num_groups": 8,
}
_VAE = {
    "block_out_channels": (32, 64),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 8,
}

IDS = (5 + torch.arange(24).view(2, 12) * 7) % 300


@dataclass(frozen=True)
class Case:
    """A model with its arguments: floating-point tensors are float16."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]

    def build(self) -> Any:
        torch.manual_seed(0)
        model = self.make().eval()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_(std=0.1)
                module.running_var.uniform_(0.5, 2)
        return model.half()

    def call(self, model: nn.Module, dtype: torch.dtype = torch.float16) -> list[Tensor]:
        """The tensors in the outputs, but for caches."""
        torch.manual_seed(1)
        inputs = {name: _cast(_cast(value, torch.float16), dtype) for name, value in self.inputs().items()}
        with torch.no_grad():
            return tensors(model(**inputs))

    def truth(self, model: nn.Module) -> list[Tensor]:
        """Return the outputs of eager float32 with the same weights."""
        return self.call(copy.deepcopy(model).float(), torch.float32)


def of(library: Any, model: str, config: str, settings: dict[str, Any]) -> Callable[[], nn.Module]:
    return lambda: getattr(library, model)(getattr(library, config)(**settings))


def tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output
    return [t for value in values for t in tensors(value)] if isinstance(output, dict | list | tuple) else []


def state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, also those that `state_dict()` leaves out."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach().clone() for name, tensor in named}


def same(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(
        value.dtype is others[name].dtype
        and value.stride() == others[name].stride()
        and torch.equal(value, others[name])
        for name, value in some.items()
    )


def error(some: list[Tensor], truth: list[Tensor]) -> float:
    """The largest distance of an output, relative to its norm."""
    return max(
        float((value.float() - true).norm() / true.norm()) for value, true in zip(some, truth, strict=True)
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _text() -> dict[str, Any]:
    return {"input_ids": IDS}


def _image() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


CASES = {
    "bert": Case(
        of(transformers, "BertModel", "BertConfig", _BERT), lambda: {**_text(), "output_hidden_states": True}
    ),
    "opt": Case(of(transformers, "OPTForCausalLM", "OPTConfig", _OPT), _text),
    "llama": Case(
        of(transformers, "LlamaForCausalLM", "LlamaConfig", {**_BERT, "initializer_range": 0.2}), _text
    ),
    "t5": Case(
        of(transformers, "T5ForConditionalGeneration", "T5Config", _T5),
        lambda: {**_text(), "decoder_input_ids": IDS},
    ),
    "whisper": Case(
        of(transformers, "WhisperForConditionalGeneration", "WhisperConfig", _WHISPER),
        lambda: {"input_features": torch.randn(2, 16, 100), "decoder_input_ids": IDS},
    ),
    "vit": Case(of(transformers, "ViTForImageClassification", "ViTConfig", _VIT), _image),
    "resnet": Case(of(transformers, "ResNetForImageClassification", "ResNetConfig", _RESNET), _image),
    "clip": Case(of(transformers, "CLIPModel", "CLIPConfig", _CLIP), lambda: {**_text(), **_image()}),
    "unet": Case(
        lambda: UNet2DConditionModel(**_UNET),
        lambda: {
            "sample": torch.randn(1, 4, 16, 16),
            "timestep": torch.tensor(7),
            "encoder_hidden_states": torch.randn(1, 5, 32),
        },
    ),
    "vae": Case(lambda: AutoencoderKL(**_VAE), lambda: {"sample": torch.randn(1, 3, 32, 32)}),
    "linears": Case(
        lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)),
        lambda: {"input": torch.randn(3, 64)},
    ),
}
