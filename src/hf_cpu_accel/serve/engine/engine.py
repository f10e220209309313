"""`Engine`: requests of many threads, and the one thread that computes them.

It stands on a cache of its own, whose rows a step computes in one call of `decoder_layers` (batch.py), and not on transformers'
`ContinuousBatchingManager`, in which each layer is a few calls around its pages: for eight prompts of 32 tokens and 48 new ones,
SmolLM2-135M in int8 takes 2.8 ms of a core per token here and 7.5 ms there, with our attention over its pages. What pages save is
memory: here each row has room for as many tokens as the longest one, and half as many again.
"""

from __future__ import annotations

import atexit
import dataclasses
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from hf_cpu_accel.serve.engine.checks import check_batches, check_model, longest
from hf_cpu_accel.serve.engine.forward import Forward
from hf_cpu_accel.serve.engine.generation import Generation, GenerationRequest
from hf_cpu_accel.serve.engine.metrics import Metrics
from hf_cpu_accel.serve.engine.queue import Queue
from hf_cpu_accel.serve.engine.scheduler import Scheduler


class Engine:
    """Continuous batching of one causal language model for many clients (threads).

    Args:
        model: a causal language model of transformers, accelerated or not. It must not be changed while the engine is there.
        rows: how many sequences are computed at once.
        waiting: how many more may wait; beyond that `submit` raises `Busy`.
        max_length: of a prompt with its new tokens; None: what the model was made for.
        prefill_chunk: tokens of prompts that are computed between two steps of the sequences that go on.
        prefix_cache_bytes: how much the keys and values of earlier sequences may take; 0: none are kept.

    Raises:
        ValueError: a number below 1 (of bytes: 0), or a model that is not accepted, with the reason.
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
        counts = {"rows": rows, "waiting": waiting, "prefill_chunk": prefill_chunk}
        for name, value in counts.items():
            _check_number(name, value, least=1)
        _check_number("prefix_cache_bytes", prefix_cache_bytes, least=0)
        check_model(model)
        self.model = model
        self.max_length = longest(model, max_length)
        self._vocabulary = model.get_input_embeddings().num_embeddings
        with torch.no_grad():
            forward = Forward(model)
            check_batches(forward)
        self._queue = Queue(waiting)
        self._scheduler = Scheduler(
            forward, rows=rows, prefill_chunk=prefill_chunk, prefix_cache_bytes=prefix_cache_bytes
        )
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, name="hf_cpu_accel.serve.engine", daemon=True)
        self._thread.start()
        atexit.register(
            self.close, timeout=0
        )  # a thread that Python ends for us may be in the middle of a kernel

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def metrics(self) -> Metrics:
        """Of this moment; any thread may ask."""
        scheduler, queue = self._scheduler, self._queue
        return dataclasses.replace(
            scheduler.metrics,
            running=scheduler.active,
            waiting=len(queue),
            requests=queue.accepted,
            prefix_cache_bytes=scheduler.prefix_cache_bytes,
        )

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
            do_sample: draw tokens, by `seed` if it is given; else the most probable ones are taken. With a seed they are those of
                `generate` after `torch.manual_seed(seed)`, as far as rounding allows.

        Raises:
            Busy: so many requests wait already.
            Stopping: after `close`.
            ValueError: no tokens, tokens that the model does not have, more than `max_length` of them, or another number that
                cannot be; it is named, with what is accepted.
        """
        request = GenerationRequest(
            tuple(input_ids), max_new_tokens, _ends(eos_token_id), logits_processor, do_sample, seed
        )
        self._check(request)
        generation = Generation(request)
        self._queue.put(generation)
        return generation

    def close(self, timeout: float | None = None) -> None:
        """Refuse new requests, and let those that were accepted finish. After `timeout` seconds, what is left is cancelled."""
        atexit.unregister(self.close)
        self._queue.close()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._scheduler.stopping = True
            self._thread.join()

    def _check(self, request: GenerationRequest) -> None:
        ids, new, seed = request.input_ids, request.max_new_tokens, request.seed
        if not ids:
            raise ValueError("input_ids is empty: at least one token is needed")
        _check_number("max_new_tokens", new, least=1)
        if seed is not None and (not isinstance(seed, int) or not 0 <= seed < 1 << 63):
            raise ValueError(f"seed={seed!r}: accepted are whole numbers from 0 to 2^63 - 1, or None")
        if len(ids) + new > self.max_length:
            raise ValueError(
                f"input_ids has {len(ids)} tokens and max_new_tokens={new}: together at most {self.max_length} are accepted"
            )
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self._vocabulary:
                raise ValueError(
                    f"input_ids has {token!r}: accepted are whole numbers from 0 to {self._vocabulary - 1}"
                )

    def _work(self) -> None:
        torch.set_num_threads(self._threads)  # a thread's own
        scheduler, queue = self._scheduler, self._queue
        error: BaseException | None = None
        try:
            with torch.no_grad():
                while queue.wait(busy=scheduler.active > 0):
                    for left in queue.take_cancelled(everything=scheduler.stopping):
                        scheduler.drop(left)
                    while scheduler.has_room and (generation := queue.take()) is not None:
                        scheduler.admit(generation)
                    scheduler.advance()
        except BaseException as unforeseen:
            error = unforeseen
            raise
        finally:  # no client may wait for a thread that is not there
            queue.close()
            for left in queue.take_cancelled(everything=True):
                left.finish(None, error)
            scheduler.fail_all(error)


def _ends(eos_token_id: int | Sequence[int] | None) -> frozenset[int]:
    if eos_token_id is None:
        return frozenset()
    return frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id)


def _check_number(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: accepted are whole numbers from {least}")
