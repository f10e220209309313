"""Tensors that their owner writes to, between two calls of a model or between two of its layers: no output uses old values."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from hf_cpu_accel.check import row_error
from tests.rewrite.decoder.encoder_decoder_families import FAMILIES
from tests.rewrite.decoder.llama_stack import accelerated, llama
from tests.rewrite.encoder_families import esm, mpnet, t5

BATCH, LENGTH = 2, 9
IDS = torch.randint(3, 90, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
Script = Callable[[nn.Module], list[Tensor]]


@pytest.fixture(params=["no_grad", "inference_mode"])
def mode(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return getattr(torch, request.param)


def check(model: nn.Module, script: Script, mode: Callable[[], Any], *, edits_matter: bool = True) -> None:
    """Check that the accelerated model agrees with the plain one in each step of `script`, and that the steps differ."""
    plain = copy.deepcopy(model)
    accelerated(model)
    with mode():
        expected, got = script(plain), script(model)
    for ours, theirs in zip(got, expected, strict=True):
        assert row_error(ours + 0, theirs) <= 1e-4
    if edits_matter:
        assert all(row_error(one, other) > 1e-3 for one, other in itertools.pairwise(expected))


def causal(dtype: torch.dtype, *hidden: int) -> Tensor:
    """[B, 1, L, L] as a custom loop has it: causal, and without the keys `hidden`."""
    seen = torch.ones(LENGTH, LENGTH).tril().bool().repeat(BATCH, 1, 1, 1)
    seen[..., list(hidden)] = False
    seen |= torch.eye(LENGTH).bool()
    return seen if dtype is torch.bool else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(dtype).min)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("write", [Tensor.copy_, lambda mask, other: mask.numpy().__setitem__(..., other)])
def test_a_mask_with_values(dtype: torch.dtype, write: Callable[..., object], mode: Any) -> None:
    def script(model: nn.Module) -> list[Tensor]:
        buffer, outputs = causal(dtype), []
        for hidden in ((), (0,), (0, 1), ()):
            write(buffer, causal(dtype, *hidden))
            outputs.append(model(IDS, attention_mask=buffer, use_cache=False).logits)
        return outputs

    check(llama(), script, mode)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_with_values_of_a_decode_loop(dtype: torch.dtype, mode: Any) -> None:
    def script(model: nn.Module) -> list[Tensor]:
        cache, buffer, outputs = DynamicCache(config=model.config), causal(dtype), []
        for step in range(LENGTH):
            row = buffer[:, :, step : step + 1, : step + 1]
            row[..., : step // 2] = False if dtype is torch.bool else torch.finfo(dtype).min
            outputs.append(model(IDS[:, step : step + 1], attention_mask=row, past_key_values=cache).logits)
        return outputs

    check(llama(), script, mode)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_padding(dtype: torch.dtype, mode: Any) -> None:
    def script(model: nn.Module) -> list[Tensor]:
        padding, outputs = torch.ones(BATCH, LENGTH, dtype=dtype), []
        for padded in range(4):
            padding[:, :padded] = 0
            outputs.append(model(IDS, attention_mask=padding, use_cache=False).logits[:, 4:])
        return outputs

    check(llama(), script, mode)


def before(module: nn.Module, edit: Callable[[dict[str, Any]], object]) -> None:
    """Has `edit` called with the arguments of a layer, ahead of it."""

    def hook(module: nn.Module, args: object, kwargs: dict[str, Any]) -> None:
        edit(kwargs)

    module.register_forward_pre_hook(hook, with_kwargs=True)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_that_a_hook_edits_between_layers(dtype: torch.dtype, mode: Any) -> None:
    def script(model: nn.Module) -> list[Tensor]:
        buffer, outputs = causal(dtype), []
        before(model.model.layers[2], lambda kwargs: kwargs["attention_mask"].copy_(causal(dtype, 0, 1)))
        for hidden in ((), (0,)):
            buffer.copy_(causal(dtype, *hidden))
            outputs.append(model(IDS, attention_mask=buffer, use_cache=False).logits)
        return outputs

    check(llama(), script, mode)


def test_padding_that_a_hook_edits_between_layers(mode: Any) -> None:
    """transformers has made its mask of it by then."""

    def script(model: nn.Module) -> list[Tensor]:
        padding = torch.ones(BATCH, LENGTH, dtype=torch.bool)
        padding[:, :2] = False
        before(model.model.layers[2], lambda kwargs: padding.fill_(True))
        return [model(IDS, attention_mask=padding, use_cache=False).logits[:, 4:]]

    check(llama(), script, mode)


def test_our_own_mask_that_a_hook_edits_between_layers(mode: Any) -> None:
    """A lazy mask must not keep its old meaning after its values are written to."""

    def script(model: nn.Module) -> list[Tensor]:
        padding = torch.ones(BATCH, LENGTH, dtype=torch.int64)
        padding[:, :2] = 0

        def hide(kwargs: dict[str, Any]) -> None:
            mask = kwargs["attention_mask"]
            row = mask[:, :, 5:7]
            if mask.dtype is torch.bool:
                row.copy_(row & (torch.arange(LENGTH) != 3))
            else:
                row[..., 3] = torch.finfo(mask.dtype).min

        outputs = [model(IDS, attention_mask=padding, use_cache=False).logits[:, 4:]]
        before(model.model.layers[2], hide)
        return [*outputs, model(IDS, attention_mask=padding, use_cache=False).logits[:, 4:]]

    check(llama(), script, mode)


def test_rotary_tables_that_a_hook_edits_between_layers(mode: Any) -> None:
    def script(model: nn.Module) -> list[Tensor]:
        outputs = [model(IDS, use_cache=False).logits]
        before(model.model.layers[2], lambda kwargs: [t.mul_(-1) for t in kwargs["position_embeddings"]])
        before(model.model.layers[3], lambda kwargs: [t.mul_(0.5) for t in kwargs["position_embeddings"]])
        return [*outputs, model(IDS, use_cache=False).logits]

    check(llama(), script, mode)


def test_rotary_tables_of_a_custom_loop(mode: Any) -> None:
    def script(model: nn.Module) -> list[Tensor]:
        states = torch.randn(BATCH, LENGTH, 64, generator=torch.Generator().manual_seed(1))
        tables = tuple(t.clone() for t in model.model.rotary_emb(states, torch.arange(LENGTH)[None]))
        outputs = []
        for _ in range(3):
            outputs.append(model.model.layers[0](states, position_embeddings=tables) + 0)
            tables[1].mul_(-1.3)
        return outputs

    check(llama(), script, mode)


@pytest.mark.parametrize("build", [t5, mpnet, lambda: esm("rotary")], ids=["t5", "mpnet", "esm"])
def test_masks_of_encoders(build: Callable[[], nn.Module], mode: Any) -> None:
    def script(model: nn.Module) -> list[Tensor]:
        padding, outputs = torch.ones(BATCH, LENGTH, dtype=torch.int64), []
        for padded in range(4):
            padding[:, LENGTH - padded :] = 0
            outputs.append(model(IDS, attention_mask=padding).last_hidden_state[:, :4])
        return outputs

    check(build(), script, mode)


@pytest.mark.parametrize("name", ["position_bias", "attention_mask"])
def test_what_the_layers_of_an_encoder_are_handed(name: str, mode: Any) -> None:
    """MPNet hands one bias and one mask to all of its layers."""

    def script(model: nn.Module) -> list[Tensor]:
        layers = model.encoder.layer
        generator = torch.Generator().manual_seed(2)
        states = torch.randn(BATCH, LENGTH, 64, generator=generator)
        given = {
            "position_bias": torch.randn(1, 4, LENGTH, LENGTH, generator=generator),
            "attention_mask": torch.zeros(BATCH, 1, 1, LENGTH),
        }
        outputs = []
        for step in range(3):
            hidden = layers[0](states, **given)[0]
            given[name][..., 2 + step] = -5.0 if name == "position_bias" else torch.finfo(torch.float32).min
            outputs += [hidden, layers[1](states, **given)[0]]
        return outputs

    check(mpnet(), script, mode)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_outputs_of_an_encoder(family: str, mode: Any) -> None:
    model = FAMILIES[family].build()
    ids = torch.full((BATCH, 1), 2)

    def script(model: nn.Module) -> list[Tensor]:
        states = model.get_encoder()(IDS).last_hidden_state.clone()
        padding, outputs = torch.ones(BATCH, LENGTH, dtype=torch.int64), []
        for step in range(3):
            call = {"encoder_outputs": (states,), "attention_mask": padding, "decoder_input_ids": ids}
            outputs.append(model(**call, use_cache=False).logits)
            outputs.append(model(**call, use_cache=True).logits)
            states[:, step] *= -3.0
            padding[:, -1 - step] = 0
        return outputs

    check(model, script, mode, edits_matter=False)


class LoRALinear(nn.Module):
    """A linear with an adapter as peft lays one around it: the scaling is a plain number in a dict."""

    def __init__(self, base_layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)
        self.scaling = {"default": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * self.scaling["default"]


def test_scalings_of_lora(mode: Any) -> None:
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoRALinear(layer.self_attn.q_proj)
        layer.mlp.down_proj = LoRALinear(layer.mlp.down_proj)
    model.eval()

    def script(model: nn.Module) -> list[Tensor]:
        outputs = []
        for scaling in (1.0, 0.0, -2.0):
            for module in model.modules():
                if isinstance(module, LoRALinear):
                    module.scaling["default"] = scaling
            outputs.append(model(IDS, use_cache=False).logits)
        return outputs

    check(model, script, mode)
