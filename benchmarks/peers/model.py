"""A saved model in a rival's environment, which has torch and transformers but not this package."""

from __future__ import annotations

from pathlib import Path

import transformers
from torch import Tensor, nn


class LastHiddenState(nn.Module):
    """A saved model as (ids, mask), int64 [batch, seq] -> [batch, seq, features]."""

    def __init__(self, folder: Path, **options: object) -> None:
        """`options` go to from_pretrained."""
        super().__init__()
        self.model = transformers.AutoModel.from_pretrained(folder, **options).eval()
        self.model.pooler = None  # the cases have none

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        output: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return output
