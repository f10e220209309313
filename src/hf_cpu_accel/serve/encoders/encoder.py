"""An encoder of the server: its tokenizer, its forward pass, and the batcher between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_cpu_accel.serve.batching import Batcher
from hf_cpu_accel.serve.encoders.tokenizing import Direction, Encoded, Text, TextTokenizer

Row = np.ndarray[Any, np.dtype[np.float32]]

# Up to this number of characters, tokenizing takes about 100 us and runs in the event loop. More would delay other requests.
_QUICK = 4000


@dataclass(frozen=True)
class LoadedEncoder:
    """A loaded and accelerated encoder.

    Attributes:
        name: the name for clients.
        tokenizer: the tokenizer.
        forward: computes float32 [rows, features], embeddings that are not normalized or logits, from `input_ids`,
            `attention_mask` and, if the tokenizer returns them, `token_type_ids`, int64 [rows, tokens].
        model: the accelerated object, for `explain`.
        labels: labels of the logits; None for embeddings.
        multi_label: True if several labels can apply to one text.
        prompts: prompts to put in front of texts, {name: prompt}.
    """

    name: str
    tokenizer: TextTokenizer
    forward: Callable[[dict[str, Tensor]], Tensor]
    model: Any
    labels: list[str] | None = None
    multi_label: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)


class Encoder:
    """Serve an encoder to all tasks of one event loop.

    Args:
        loaded: the model.
        batching: options of `Batcher`.
    """

    def __init__(self, loaded: LoadedEncoder, **batching: Any) -> None:
        self.loaded, self.name, self.model = loaded, loaded.name, loaded.model
        self._tokenizer_thread = ThreadPoolExecutor(1, thread_name_prefix=f"tokenizer of {self.name}")
        self.batcher: Batcher[Encoded, Row] = Batcher(
            lambda batch: compute(loaded, batch), name=f"encoder {self.name}", **batching
        )

    @property
    def capabilities(self) -> tuple[str, ...]:
        if self.loaded.labels is None:
            return ("embed",)
        return ("predict", "rerank") if len(self.loaded.labels) == 1 else ("predict",)

    @property
    def waiting(self) -> int:
        return self.batcher.waiting

    async def encode(
        self, texts: Sequence[Text], *, truncate: bool = False, direction: Direction = "right"
    ) -> list[Encoded]:
        """Tokenize texts; see `TextTokenizer.encode` for the arguments and errors."""
        tokenizer = self.loaded.tokenizer
        if sum(map(_characters, texts)) <= _QUICK:
            return tokenizer.encode(texts, truncate=truncate, direction=direction)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._tokenizer_thread, lambda: tokenizer.encode(texts, truncate=truncate, direction=direction)
        )

    async def rows(self, encoded: Sequence[Encoded]) -> list[Row]:
        """Compute float32 [features] for each text; cancelling the task removes the texts from the queue.

        Raises:
            Busy, TooLong, Stopping: see `Batcher.submit`.
        """
        return await gather(self.batcher.submit(encoded, [len(text.ids) for text in encoded]))

    def close(self, timeout: float | None = None) -> bool:
        """Finish waiting texts; return False if that takes longer than `timeout` seconds."""
        self._tokenizer_thread.shutdown(wait=False)
        return self.batcher.close(timeout)


async def gather(futures: Sequence[Future[Any]]) -> list[Any]:
    """Return the results of all futures; if one fails or the task is cancelled, cancel the others."""
    try:
        return await asyncio.gather(*map(asyncio.wrap_future, futures))
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def compute(loaded: LoadedEncoder, batch: Sequence[Encoded]) -> list[Row]:
    """Compute float32 [features] for each text of a batch."""
    with torch.inference_mode():
        return list(loaded.forward(pad(loaded.tokenizer, batch)).float().numpy())


def pad(tokenizer: TextTokenizer, batch: Sequence[Encoded]) -> dict[str, Tensor]:
    """Return the inputs of the model, int64 [texts, tokens of the longest text]."""
    shape = len(batch), max(len(text.ids) for text in batch)
    ids = np.full(shape, tokenizer.pad_id, dtype=np.int64)
    mask, type_ids = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for row, text in enumerate(batch):
        places = slice(-len(text.ids), None) if tokenizer.pads_left else slice(len(text.ids))
        ids[row, places], mask[row, places], type_ids[row, places] = text.ids, 1, text.type_ids
    inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
    if tokenizer.has_type_ids:
        inputs["token_type_ids"] = torch.from_numpy(type_ids)
    return inputs


def _characters(text: Text) -> int:
    return sum(map(len, text)) if isinstance(text, tuple) else len(text)
