"""The metrics of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_cpu_accel.generate.speculation.draft import Speculation


@dataclass
class Metrics:
    """Current numbers, and totals since the creation of the engine.

    Attributes:
        running: number of running requests, in prefill or decode.
        waiting: number of requests in the queue.
        requests: total of submitted requests.
        completed: total of completed requests.
        cancelled: total of cancelled requests.
        failed: total of failed requests.
        prompt_tokens: total of tokens in started prompts.
        prefix_tokens: total of these tokens that were in the prefix cache.
        generated_tokens: total of new tokens.
        speculation: counts of drafted and accepted tokens.
        prefix_cache_bytes: size of the prefix cache in bytes.
    """

    running: int = 0
    waiting: int = 0
    requests: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    generated_tokens: int = 0
    speculation: Speculation = field(default_factory=Speculation)
    prefix_cache_bytes: int = 0
