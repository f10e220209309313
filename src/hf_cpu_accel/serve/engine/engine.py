"""`Engine`: continuous batching. Many threads submit requests, and one thread computes them.

The engine has its own KV cache, whose rows a step computes in one call of `decoder_layers` (batch.py). It does not use the
`ContinuousBatchingManager` of transformers, which makes several calls per layer around its pages. For eight prompts of 32 tokens
and 48 new tokens, SmolLM2-135M in int8 takes 2.8 ms of a core per token here and 7.5 ms there, with this package's attention over
its pages. Pages save memory: here each row has room for up to 1.5 times the tokens of the longest row.
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
    """Generate with one causal language model for many clients (threads), with continuous batching.

    Args:
        model: a causal language model of transformers, accelerated or not. Do not change it while the engine runs.
        rows: maximum number of sequences per step.
        waiting: maximum number of waiting requests; `submit` raises `Busy` for more.
        max_length: maximum tokens of a prompt with its new tokens; None for the limit of the model.
        prefill_chunk: maximum tokens of prompts that are computed between two decode steps.
        prefix_cache_bytes: maximum size of the prefix cache in bytes; 0 for no cache.

    Raises:
        ValueError: a number below its minimum, or a model that is not supported, with the reason.
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
            forward,
            rows=rows,
            prefill_chunk=prefill_chunk,
            prefix_cache_bytes=prefix_cache_bytes,
            speculates=getattr(model.generate, "speculates", False),
        )
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, name="hf_cpu_accel.serve.engine", daemon=True)
        self._thread.start()
        atexit.register(self.close, timeout=0)  # Python would stop a thread in the middle of a kernel

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def metrics(self) -> Metrics:
        """Return the current metrics; any thread may call this."""
        scheduler, queue = self._scheduler, self._queue
        return dataclasses.replace(
            scheduler.metrics,
            running=scheduler.active,
            waiting=len(queue),
            requests=queue.accepted,
            prefix_cache_bytes=scheduler.prefix_cache_bytes,
            speculation=dataclasses.replace(scheduler.metrics.speculation),
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
        """Queue a request to continue a prompt; any thread may call this.

        Args:
            input_ids: the prompt.
            max_new_tokens: maximum number of new tokens.
            eos_token_id: the tokens that end the sequence; the end token is the last token of the result.
            logits_processor: a `LogitsProcessorList` for this request only (temperature, top_p, penalties, ...).
            do_sample: sample tokens; False takes the most probable ones.
            seed: seed for sampling. The tokens are those of `generate` after `torch.manual_seed(seed)`, up to rounding.

        Returns:
            The generation, which yields the tokens as they are computed.

        Raises:
            Busy: the queue is full.
            Stopping: after `close`.
            ValueError: no tokens, unknown tokens, more than `max_length` tokens, or a number outside of its limits.
        """
        request = GenerationRequest(
            tuple(input_ids), max_new_tokens, _ends(eos_token_id), logits_processor, do_sample, seed
        )
        self._check(request)
        generation = Generation(request)
        self._queue.put(generation)
        return generation

    def close(self, timeout: float | None = None) -> None:
        """Reject new requests and finish the accepted ones; cancel those that run after `timeout` seconds."""
        atexit.unregister(self.close)
        self._queue.close()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._scheduler.stopping = True
            self._thread.join()

    def _check(self, request: GenerationRequest) -> None:
        ids, new, seed = request.input_ids, request.max_new_tokens, request.seed
        if not ids:
            raise ValueError("input_ids is empty: expected at least one token")
        _check_number("max_new_tokens", new, least=1)
        if seed is not None and (not isinstance(seed, int) or not 0 <= seed < 1 << 63):
            raise ValueError(f"seed={seed!r}: expected a whole number from 0 to 2^63 - 1, or None")
        if len(ids) + new > self.max_length:
            raise ValueError(
                f"input_ids has {len(ids)} tokens and max_new_tokens={new}: expected at most {self.max_length} together"
            )
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self._vocabulary:
                raise ValueError(
                    f"input_ids contains {token!r}: expected whole numbers from 0 to {self._vocabulary - 1}"
                )

    def _work(self) -> None:
        torch.set_num_threads(self._threads)  # the setting is per thread
        scheduler, queue = self._scheduler, self._queue
        error: BaseException | None = None
        try:
            with torch.no_grad():
                while queue.wait(busy=scheduler.active > 0):
                    for generation in queue.take_cancelled(everything=scheduler.stopping):
                        scheduler.drop(generation)
                    while scheduler.has_room and (waiting := queue.take()) is not None:
                        scheduler.admit(waiting)
                    scheduler.advance()
        except BaseException as unexpected:
            error = unexpected
            raise
        finally:  # no client may wait for a thread that has ended
            queue.close()
            for generation in queue.take_cancelled(everything=True):
                generation.finish(None, error)
            scheduler.fail_all(error)


def _ends(eos_token_id: int | Sequence[int] | None) -> frozenset[int]:
    if eos_token_id is None:
        return frozenset()
    return frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id)


def _check_number(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: expected a whole number from {least}")
