"""The calls of a model that an engine makes: tokens, positions and masks in, the logits of the last token out."""

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
    """A model with its layout.

    Args:
        model: one for which `refusal` of checks.py has nothing to say.

    Attributes:
        layout: what the model keeps of each token.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._takes = inspect.signature(model.forward).parameters
        # In what `generate` of the accelerated model stores them.
        self._dtype = getattr(model.generate, "cache_dtype", None)
        cache = self.new_cache()
        self.extend(cache, [0, 1], 0)
        self.layout = Layout.of(cache)

    def new_cache(self) -> CPUCache:
        return empty_cache(self.model.config, self._dtype)

    def new_row(self, capacity: int) -> tuple[Storage, CPUCache]:
        """Room for one sequence, and the cache that is about it."""
        storage, cache = Storage(self.layout, 1, capacity), self.new_cache()
        storage.attach(cache, 1, 0)
        return storage, cache

    def steps(self, cache: CPUCache, length: int) -> DecodeSteps:
        """For calls with one token of each sequence, whose cache holds `length` positions."""
        return DecodeSteps(self.model, cache, length + 1, None)

    def __call__(
        self, ids: Tensor, positions: Tensor, mask: Tensor, cache: CPUCache, steps: DecodeSteps | None = None
    ) -> Tensor:
        """
        Args:
            ids, positions: int64 [B, q_len], the tokens and where each of them stands in its own sequence.
            mask: int64 [B, tokens in the cache + q_len], 1 where there is a token.
            cache: gets the keys and values.
            steps: of that cache, for calls with one token that follow one another.

        Returns:
            float32 [B, vocabulary], of the last token of each sequence.
        """
        inputs: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": positions,
            CACHE: cache,
            "use_cache": True,
            "logits_to_keep": 1,
        }
        taken = {name: value for name, value in inputs.items() if name in self._takes}
        outputs = self.model(**taken, return_dict=True) if steps is None else steps(taken)
        logits: Tensor = outputs.logits
        return logits[:, -1].float()

    def extend(self, cache: CPUCache, tokens: Sequence[int], first: int) -> Tensor:
        """Append tokens to a cache of one sequence, of which it holds `first`."""
        last = first + len(tokens)
        positions = torch.arange(first, last)[None]
        return self(torch.tensor([tokens]), positions, torch.ones(1, last, dtype=torch.long), cache)
