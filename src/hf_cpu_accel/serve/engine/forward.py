"""The forward calls of an engine: from tokens, positions and masks to the logits of the last tokens."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.generate.cache import CPUCache
from hf_cpu_accel.generate.inputs import CACHE
from hf_cpu_accel.generate.replay.steps import DecodeSteps
from hf_cpu_accel.serve.engine.storage import Layout, Storage, empty_cache


class Forward:
    """A model and the layout of its KV cache.

    Args:
        model: a model that passes `checks.check_model`.

    Attributes:
        layout: layout of the keys and values of a token.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._parameters = inspect.signature(model.forward).parameters
        # The dtype of the KV cache in `generate` of the accelerated model.
        self._dtype = getattr(model.generate, "cache_dtype", None)
        cache = self.new_cache()
        self.extend(cache, [0, 1], 0)
        self.layout = Layout.of(cache)

    def new_cache(self) -> CPUCache:
        """Return an empty cache."""
        return empty_cache(self.model.config, self._dtype)

    def new_row(self, capacity: int) -> tuple[Storage, CPUCache]:
        """Return a storage for one sequence of up to `capacity` tokens, and its cache."""
        storage, cache = Storage(self.layout, 1, capacity), self.new_cache()
        storage.attach(cache, 1, 0)
        return storage, cache

    def steps(self, cache: CPUCache, length: int) -> DecodeSteps:
        """Return the captured steps for calls with one token per sequence, after `length` positions in the cache."""
        return DecodeSteps(self.model, cache, length + 1, None)

    def __call__(
        self, ids: Tensor, positions: Tensor, mask: Tensor, cache: CPUCache, steps: DecodeSteps | None = None
    ) -> Tensor:
        """Append tokens to the sequences of a cache and return the logits of the last ones.

        Args:
            ids: the tokens, int64 [B, q_len].
            positions: their positions in their sequences, int64 [B, q_len].
            mask: int64 [B, tokens in the cache + q_len], 1 for a token, 0 for padding.
            cache: the cache, to which the keys and values are appended.
            steps: the captured steps of that cache, for consecutive calls with one token per sequence.

        Returns:
            Logits of the last token of each sequence, float32 [B, vocabulary].
        """
        inputs = self.inputs(ids, positions, mask, cache)
        outputs = self.model(**inputs, return_dict=True) if steps is None else steps(inputs)
        logits: Tensor = outputs.logits
        return logits[:, -1].float()

    def inputs(
        self, ids: Tensor, positions: Tensor, mask: Tensor, cache: CPUCache, logits: int = 1
    ) -> dict[str, Any]:
        """Return the arguments of the model for such a call, with logits of so many last tokens."""
        inputs: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": positions,
            CACHE: cache,
            "use_cache": True,
            "logits_to_keep": logits,
        }
        return {name: value for name, value in inputs.items() if name in self._parameters}

    def extend(self, cache: CPUCache, tokens: Sequence[int], first: int) -> Tensor:
        """Append tokens to a cache that contains the first `first` tokens of one sequence; return the logits of the last one."""
        last = first + len(tokens)
        positions = torch.arange(first, last)[None]
        return self(torch.tensor([tokens]), positions, torch.ones(1, last, dtype=torch.long), cache)
