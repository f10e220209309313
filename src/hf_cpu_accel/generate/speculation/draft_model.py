"""Drafts by a smaller model with the same tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_cpu_accel.generate.cache import CPUCache
from hf_cpu_accel.generate.inputs import CACHE, StepInputs, prefill
from hf_cpu_accel.generate.speculation.calls import TextCalls
from hf_cpu_accel.generate.speculation.draft import common_length


class ModelDrafter:
    """Drafts the tokens that `model` finds most likely, with a cache of its own.

    Args:
        model: decodes text with the vocabulary of the model that verifies.
        ids: the text, int64 [1, tokens].
        mask: its attention mask, or None.
    """

    is_free = False

    def __init__(self, model: Any, ids: Tensor, mask: Tensor | None) -> None:
        self._text: list[int] = ids[0].tolist()
        cache: Any = DynamicCache(config=model.config)
        if CPUCache.can_replace(cache):
            cache = CPUCache.like(cache, getattr(model.generate, "cache_dtype", None))
        kwargs: dict[str, Any] = {CACHE: cache, "use_cache": True, "attention_mask": mask}
        if model._supports_logits_to_keep():
            kwargs["logits_to_keep"] = 1
        length = len(self._text)
        outputs, first = prefill(model, ids, model.generation_config, kwargs, None)
        self._calls = TextCalls(model, StepInputs(model, first, kwargs, outputs, length), length, None)
        self._cached = list(self._text)  # the tokens in its cache

    def append(self, token: int) -> None:
        self._text.append(token)

    def confidence(self) -> int:
        return 3

    def draft(self, count: int) -> list[int]:
        text = self._text
        # A call has a token at least.
        kept = min(common_length(self._cached, text), len(text) - 1)
        self._calls.keep(kept)
        new_tokens, ids = len(text) - kept, torch.tensor([text])
        drafted: list[int] = []
        while True:
            with torch.no_grad():
                logits = self._calls.logits(ids, new_tokens)
            drafted.append(int(logits[-1].argmax()))
            if len(drafted) == count:
                break
            ids, new_tokens = torch.tensor([text + drafted]), 1
        self._cached = text + drafted[:-1]
        return drafted
