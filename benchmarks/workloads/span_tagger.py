"""Names of things in texts, as GLiNER finds them (Zaratiana et al. 2023, arXiv:2311.08526): a DeBERTa, and a score for each span
and each kind of thing, which the beginning of the text names."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn
from transformers import DebertaV2Config, DebertaV2Model, DebertaV2PreTrainedModel

from hf_cpu_accel.cli import random_models

KINDS, WIDEST = 8, 12  # of things; words of a span
_PROMPT = 2 * KINDS  # tokens: a mark and a word for each
_SHORTEST, _LONGEST = 40, 144


class SpanTagger(DebertaV2PreTrainedModel):
    """Of texts whose words are tokens; in a rival's environment, too."""

    def __init__(self, config: DebertaV2Config) -> None:
        super().__init__(config)
        width = config.hidden_size * 2 // 3
        self.deberta = DebertaV2Model(config)
        self.projection = nn.Linear(config.hidden_size, width)
        self.first, self.last, self.kind = (_projection(width, width) for _ in range(3))
        self.span = _projection(2 * width, width)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
        """Both [batch, tokens] -> scores [batch, words, WIDEST * KINDS] of the spans that begin with each word,
        0 for those that end behind the text."""
        hidden = self.projection(self.deberta(input_ids, attention_mask=attention_mask)[0])
        kinds, words = self.kind(hidden[:, :_PROMPT:2]), hidden[:, _PROMPT:]
        count = words.shape[1]
        ends = torch.arange(count, device=words.device)[:, None] + torch.arange(WIDEST, device=words.device)
        first, last = self.first(words), self.last(words)[:, ends.clamp(max=count - 1)]
        spans = self.span(torch.cat([first[:, :, None].expand_as(last), last], dim=-1).relu())
        inside = attention_mask[:, _PROMPT:][:, ends.clamp(max=count - 1)] * (ends < count)
        return ((torch.einsum("bwsd,bkd->bwsk", spans, kinds) * inside[..., None]).flatten(2),)


def _projection(features: int, out_features: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(features, 4 * out_features), nn.ReLU(), nn.Linear(4 * out_features, out_features)
    )


def build() -> nn.Module:
    return SpanTagger(random_models.config("deberta-v3-base"))


def inputs(batch: int, generator: Generator) -> dict[str, Tensor]:
    """Texts of 40 to 144 tokens, the longest first."""
    lengths = torch.linspace(_LONGEST, _SHORTEST, batch).long()
    mask = torch.arange(_LONGEST) < lengths[:, None]
    tokens = torch.randint(1000, 100_000, (batch, _LONGEST), generator=generator)
    return {"input_ids": torch.where(mask, tokens, 0), "attention_mask": mask.long()}
