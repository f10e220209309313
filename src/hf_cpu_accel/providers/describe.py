"""The lines about providers in `explain()`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hf_cpu_accel.providers import switch
from hf_cpu_accel.providers.choice import LARGEST_RANGE, chooser


def describe(asked: str) -> str:
    """Return whether other providers are measured, and where the results are cached.

    Raises:
        ValueError: the environment variable of the switch has a value that is not accepted.
    """
    reason = switch.why_not(asked)
    if reason is not None:
        return f"hf_cpu_accel only: {reason}"
    store = chooser().store(torch.get_num_threads())
    if store.problem is not None:
        return f"the fastest measured, not cached: {store.problem}"
    return f"the fastest measured, cached in {store.path}"


def summary(elsewhere: Mapping[tuple[int, int], str]) -> str:
    """Return `{(65, 128): "oneDNN"}` as "oneDNN: 65-128 rows"; "ours" if it is empty."""
    by_provider: dict[str, list[tuple[int, int]]] = {}
    for (first, last), provider in sorted(elsewhere.items()):
        ranges = by_provider.setdefault(provider, [])
        if ranges and ranges[-1][1] + 1 == first:
            first = ranges.pop()[0]
        ranges.append((first, last))
    if not by_provider:
        return "ours"
    return "; ".join(
        f"{provider}: {', '.join(map(_as_text, ranges))} rows" for provider, ranges in by_provider.items()
    )


def _as_text(row_range: tuple[int, int]) -> str:
    first, last = row_range
    return f"{first}+" if last == LARGEST_RANGE[1] else f"{first}-{last}"
