"""`Engine`: requests of many threads, and the one thread that computes them."""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_cpu_accel.serve.engine.generation import Busy, Generation, GenerationRequest
from hf_cpu_accel.serve.engine.metrics import Metrics


class Engine:
    """Continuous batching of one causal language model for many clients (threads).

    Args:
        model: a causal language model of transformers.
        rows: how many sequences are computed at once.
        waiting: how many more may wait; beyond that `submit` raises `Busy`.
        max_length: of a prompt with its new tokens; None: what the model was made for.
        prefill_chunk: tokens of a prompt that are computed between two steps of the others.
        prefix_cache_bytes: how much keys and values of earlier sequences may take.
    """

    def __init__(
        self,
        model: Any,
        *,
        rows: int = 8,
        waiting: int = 64,
        max_length: int | None = None,
        prefill_chunk: int = 256,
        prefix_cache_bytes: int = 1 << 29,
    ) -> None:
        self.model = model
        self.max_length = max_length or model.config.max_position_embeddings
        self._limit = waiting
        self._metrics = Metrics()
        self._waiting: collections.deque[Generation] = collections.deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="hf_cpu_accel engine", daemon=True)
        self._thread.start()

    @property
    def metrics(self) -> Metrics:
        with self._changed:
            self._metrics.waiting = len(self._waiting)
            return Metrics(**vars(self._metrics))

    def submit(
        self,
        input_ids: Sequence[int],
        *,
        max_new_tokens: int,
        eos_token_id: int | Sequence[int] | None = None,
        logits_processor: Any = None,
        do_sample: bool = False,
        seed: int | None = None,
    ) -> Generation:
        """Ask for the tokens that follow a prompt; any thread may.

        Args:
            input_ids: the prompt.
            eos_token_id: what ends the sequence; it is handed out as the last token.
            logits_processor: a `LogitsProcessorList` of this request alone (temperature, top_p, penalties, ...).
            do_sample: draw tokens, by `seed` if it is given; else the most probable ones are taken.

        Raises:
            Busy: `waiting` requests wait already, or `close` was called.
            ValueError: no tokens, tokens that the model does not have, or more than `max_length` of them.
        """
        total = len(input_ids) + max_new_tokens
        if not input_ids:
            raise ValueError("input_ids is empty: at least one token is needed")
        if total > self.max_length:
            raise ValueError(
                f"input_ids has {len(input_ids)} tokens and max_new_tokens={max_new_tokens}: together at most "
                f"{self.max_length} are accepted"
            )
        ends = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id or ()
        request = GenerationRequest(
            tuple(input_ids), max_new_tokens, frozenset(ends), logits_processor, do_sample, seed
        )
        generation = Generation(request)
        with self._changed:
            if self._closing or len(self._waiting) >= self._limit:
                raise Busy(
                    "the engine is being closed"
                    if self._closing
                    else f"{self._limit} requests are waiting already"
                )
            self._metrics.requests += 1
            self._waiting.append(generation)
            self._changed.notify_all()
        return generation

    def close(self, timeout: float | None = None) -> None:
        """Refuse new requests, and let those that were accepted finish. After `timeout` seconds the rest is cancelled."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                generation = self._waiting.popleft()
                self._metrics.running = 1
            try:
                self._generate(generation)
                self._metrics.completed += 1
            except BaseException as error:
                generation.finish(None, error)
                self._metrics.failed += 1
            self._metrics.running = 0

    def _generate(self, generation: Generation) -> None:
        request = generation.request
        if request.seed is not None:
            torch.manual_seed(request.seed)
        streaming = _Streaming(generation)
        self.model.generate(
            torch.tensor([request.input_ids]),
            do_sample=request.do_sample,
            max_new_tokens=request.max_new_tokens,
            eos_token_id=sorted(request.ends) or None,
            logits_processor=request.logits_processor,
            stopping_criteria=StoppingCriteriaList([streaming]),
        )
        self._metrics.prompt_tokens += generation.prompt_tokens
        self._metrics.generated_tokens += streaming.count
        ended = streaming.last in request.ends
        generation.finish("cancelled" if generation.is_cancelled else "stop" if ended else "length")


class _Streaming(StoppingCriteria):
    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.count = 0
        self.last: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.last = int(input_ids[0, -1])
        self.count += 1
        self.generation.put(self.last)
        return torch.tensor([self.generation.is_cancelled])
