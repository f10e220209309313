"""Tiny models of the supported kinds, and calls of them with comparable outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 100
# Relative to the largest value of the answer. One who compares two calls of one model finds what depends on the order of calls:
# a convolution that has learnt not to wait rounds its output once more.
_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.05}


@dataclass(frozen=True)
class Served:
    """A model and its calls.

    Attributes:
        build: the model, always with the same weights.
        request: the arguments of request number `n`; requests differ in their shapes.
        call: the answer of a model to a request.
        exact: whether answers are whole numbers.
    """

    build: Callable[[], Any]
    request: Callable[[int], dict[str, Any]]
    call: Callable[[Any, dict[str, Any]], Tensor]
    exact: bool = False

    def answer(self, model: Any, number: int) -> Tensor:
        with torch.no_grad():
            return self.call(model, self.request(number)).clone()

    def agrees(self, answer: Tensor, expected: Tensor) -> bool:
        """Return whether two outputs are equal up to rounding."""
        if self.exact:
            return torch.equal(answer, expected)
        bound = _BOUNDS[expected.dtype] * expected.abs().max()
        return answer.shape == expected.shape and bool(((answer - expected).abs() <= bound).all())


def _bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=2
    )  # fmt: skip
    return transformers.BertModel(config).eval()


def _text(number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    length, batch = 5 + number % 7, 1 + number % 3
    ids = torch.randint(4, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, length - number % 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _embedded(model: Any, request: dict[str, Any]) -> Tensor:
    return model(**request).last_hidden_state[:, 0]


def _llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=2, initializer_range=0.3, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def _prompt(number: int) -> dict[str, Any]:
    request = _text(number)
    request["attention_mask"] = request["attention_mask"].flip(1)
    return request


def _generated(model: Any, request: dict[str, Any]) -> Tensor:
    return model.generate(**request, max_new_tokens=6, do_sample=False)


def _unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8, layers_per_block=1, block_out_channels=(32,), norm_num_groups=8, cross_attention_dim=32,
        down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
        attention_head_dim=16,
    ).eval()  # fmt: skip


def _noise(number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    side = 8 if number % 2 else 16
    return {
        "sample": torch.randn(1 + number % 2, 4, side, side, generator=generator),
        "timestep": 1 + number,
        "encoder_hidden_states": torch.randn(1 + number % 2, 5, 32, generator=generator),
    }


def _denoised(model: Any, request: dict[str, Any]) -> Tensor:
    return model(**request).sample


def _gat() -> nn.Module:
    from torch_geometric.nn.models import GAT

    torch.manual_seed(0)
    return GAT(in_channels=24, hidden_channels=32, num_layers=2, out_channels=8, heads=2).eval()


def _graph(number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    nodes = 20 + number % 5
    return {
        "x": torch.randn(nodes, 24, generator=generator),
        "edge_index": torch.randint(0, nodes, (2, 60 + number % 11), generator=generator),
    }


def _classified(model: Any, request: dict[str, Any]) -> Tensor:
    return model(**request)


SERVED = {
    "encoder": Served(_bert, _text, _embedded),
    "decoder": Served(_llama, _prompt, _generated, exact=True),
    "unet": Served(_unet, _noise, _denoised),
    "gnn": Served(_gat, _graph, _classified),
}
