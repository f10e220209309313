"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Metrics:
    """Numbers since the engine was made, and of this moment.

    Attributes:
        running: requests that are being computed: their prompt, or token after token.
        waiting: requests in the queue.
        requests, completed, cancelled, failed: submitted so far, and how they ended.
        prompt_tokens: in prompts that were begun.
        prefix_tokens: of those, how many were found in the prefix cache.
        generated_tokens: handed to clients.
        prefix_cache_bytes: held by the prefix cache.
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
    prefix_cache_bytes: int = 0
