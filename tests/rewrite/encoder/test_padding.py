"""Hidden states at padding are skipped only where no code reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.encoder.layer import FusedEncoderLayer
from tests.rewrite.encoder_families import SIZES, bert, modernbert, t5

IDS = torch.randint(5, 99, (3, 9), generator=torch.Generator().manual_seed(3))


def roberta_classifier() -> nn.Module:
    return tf.RobertaForSequenceClassification(tf.RobertaConfig(**SIZES)).eval()


def siglip_text() -> nn.Module:
    return tf.SiglipTextModel(tf.SiglipTextConfig(**SIZES, max_position_embeddings=32)).eval()


class MeanOfAll(tf.BertPreTrainedModel):
    """Pools without the mask."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = tf.BertModel(config, add_pooling_layer=False)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
        return (self.bert(input_ids, attention_mask)[0].mean(1),)


def mean_of_all() -> nn.Module:
    return MeanOfAll(tf.BertConfig(**SIZES)).eval()


def mask(side: str) -> Tensor:
    made = torch.ones(3, 9, dtype=torch.long)
    made[1, -4:] = made[2, -1:] = 0
    return made if side == "right" else made.flip(1)


def tensors(model: nn.Module, attention_mask: Tensor) -> list[Tensor]:
    with torch.no_grad():
        output = model(input_ids=IDS.masked_fill(attention_mask == 0, 1), attention_mask=attention_mask)
    values = output.values() if isinstance(output, dict) else output
    tokens = attention_mask.bool()
    return [value[tokens] if value.shape[:2] == tokens.shape else value for value in values]


def chinese_clip() -> nn.Module:
    """The whole model reads the first position of its text model, which has no pooler."""
    images = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 8,
    }
    config = tf.ChineseCLIPConfig(text_config=SIZES, vision_config={**images, "intermediate_size": 96})
    return TextsOfClip(tf.ChineseCLIPModel(config)).eval()


class TextsOfClip(nn.Module):
    def __init__(self, clip: nn.Module) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
        images = torch.ones(3, 3, 16, 16)
        return (
            self.clip(input_ids=input_ids, attention_mask=attention_mask, pixel_values=images).text_embeds,
        )


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    "build", [bert, chinese_clip, siglip_text, roberta_classifier, mean_of_all, modernbert]
)
def test_what_reads_padding_is_right(build: Any, side: str) -> None:
    torch.manual_seed(0)
    model = build()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2) if parameter.dim() > 1 else None
    before = tensors(model, mask(side))
    accelerate_for_cpu(model, dtype="float32")
    assert any(isinstance(module, FusedEncoderLayer) for module in model.modules())
    for _ in range(2):  # the first call of each part runs its own forward, too
        torch.testing.assert_close(tensors(model, mask(side)), before, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("build", "side", "skips"),
    [
        (bert, "right", True),
        (bert, "left", False),
        (siglip_text, "right", False),
        (siglip_text, "left", True),
        (mean_of_all, "right", False),
        (mean_of_all, "left", False),
        (modernbert, "right", True),
        (modernbert, "left", True),
        (t5, "right", True),
        (t5, "left", True),
        (lambda: bert_for_tokens(), "left", True),
    ],
)
def test_padding_that_nobody_reads_is_left_out(build: Any, side: str, skips: bool) -> None:
    model = accelerate_for_cpu(build(), dtype="float32")
    layer = next(module for module in model.modules() if isinstance(module, FusedEncoderLayer))
    seen: list[Tensor] = []
    layer.register_forward_hook(
        lambda _, args, output: seen.append(output[0] if isinstance(output, tuple) else output)
    )
    tensors(model, mask(side))
    assert (seen[0][~mask(side).bool()] == 0).all() == skips


def bert_for_tokens() -> nn.Module:
    return tf.BertForTokenClassification(tf.BertConfig(**SIZES)).eval()


def test_explain_says_so() -> None:
    model = accelerate_for_cpu(bert(), dtype="float32")
    assert explain(model).notes == (
        "BertModel: the first position is read even if it is padding: left padding is computed",
    )
    assert explain(model).notes[0] in str(explain(model)).replace("\n", " ")
    assert not explain(accelerate_for_cpu(bert_for_tokens(), dtype="float32")).notes
    assert not explain(accelerate_for_cpu(bert(), dtype="float32", padding="compute")).notes
    assert not explain(restore(model)).notes
