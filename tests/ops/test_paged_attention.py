"""paged_attention against its plain-torch reference: sequences of many lengths, pages in any order, every type of cache."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_cpu_accel.ops.kv_cache import to_storage
from hf_cpu_accel.ops.paged_attention import paged_attention, paged_attention_reference

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Case:
    lengths: tuple[tuple[int, int], ...] = (
        (1, 1),
        (1, 40),
        (5, 5),
        (1, 300),
        (17, 90),
        (0, 3),
    )  # (queries, keys)
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    value_dim: int = 64
    dtype: torch.dtype = torch.float32
    cache: torch.dtype = torch.float32
    window: int | None = None


CASES = [
    Case(),
    Case(dtype=torch.bfloat16, cache=torch.bfloat16),
    Case(cache=torch.bfloat16, heads=4, kv_heads=4, head_dim=20, value_dim=33),
    Case(cache=torch.int8, window=12),
    Case(window=7),
    Case(lengths=((40, 500), (1, 700), (64, 64)), heads=8, kv_heads=1),
    Case(lengths=((1, 9),), cache=torch.int8, head_dim=17),
    Case(lengths=((0, 4), (0, 0))),
]


def arguments(case: Case) -> dict[str, Any]:
    """Keys lie in pages of 16 slots, those of all sequences mixed; what lies in no page of theirs is NaN."""
    queries, keys = (sum(pair[i] for pair in case.lengths) for i in range(2))
    slots = (torch.randperm(keys // 16 + 3)[:, None] * 16 + torch.arange(16)).flatten()[:keys]
    count = (keys // 16 + 3) * 16

    def pages(width: int) -> Tensor:
        states = torch.full((count, case.kv_heads, width), torch.nan)
        states[slots] = torch.randn(keys, case.kv_heads, width)
        return to_storage(states, case.cache)

    begins = [
        torch.tensor([0, *itertools.accumulate(pair[i] for pair in case.lengths)], dtype=torch.int32)
        for i in range(2)
    ]
    return {
        # as a model's projection leaves it: heads beside each other, seen from the side
        "query": torch.randn(case.heads, queries, case.head_dim).to(case.dtype).transpose(0, 1),
        "key": pages(case.head_dim),
        "value": pages(case.value_dim),
        "query_begin": begins[0],
        "key_begin": begins[1],
        "slots": slots.int(),
        "scale": case.head_dim**-0.5,
        "window": case.window,
    }


def flat(given: dict[str, Any]) -> tuple[Any, ...]:
    """As the op takes them."""
    names = ("query", "key", "value", "query_begin", "key_begin", "slots")
    tensors = tuple(given[name] for name in names)
    return (*tensors, given["window"] or 0, given["scale"])


def check(case: Case) -> None:
    given = arguments(case)
    expected = paged_attention_reference(*flat(given)).float()
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            output = paged_attention(**given)
            assert output.dtype is case.dtype
            assert output.shape == expected.shape
            torch.testing.assert_close(output.float(), expected, rtol=0, atol=BOUNDS[case.dtype] * 4)
    finally:
        torch.set_num_threads(threads)


def check_paged_attention(seed: int) -> None:
    """For the tiers, each in a process of its own."""
    torch.manual_seed(seed)
    for case in CASES:
        check(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case: Case) -> None:
    torch.manual_seed(0)
    check(case)


def test_a_sequence_does_not_see_the_others() -> None:
    torch.manual_seed(0)
    given = arguments(Case())
    together = paged_attention(**given)
    ends = zip(given["query_begin"].tolist(), given["key_begin"].tolist(), strict=True)
    for (first, first_key), (last, last_key) in itertools.pairwise(ends):
        alone = {
            **given,
            "query": given["query"][first:last],
            "query_begin": torch.tensor([0, last - first], dtype=torch.int32),
            "key_begin": torch.tensor([0, last_key - first_key], dtype=torch.int32),
            "slots": given["slots"][first_key:last_key],
        }
        torch.testing.assert_close(paged_attention(**alone), together[first:last], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [Case(), Case(cache=torch.int8, window=3)], ids=str)
def test_opcheck(case: Case) -> None:
    given = arguments(case)
    given["key"], given["value"] = (
        pages if pages.dtype is torch.int8 else pages.nan_to_num() for pages in (given["key"], given["value"])
    )
    torch.library.opcheck(torch.ops.hf_cpu_accel.paged_attention.default, flat(given))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("query", lambda x: x[None], r"query of shape .*must be \[tokens or slots"),
        ("key", lambda x: x[..., 1:], r"key of shape .*does not fit query"),
        ("query_begin", lambda x: x - 1, "query_begin must rise from 0 to 25"),
        ("key_begin", lambda x: x.long(), r"key_begin must be int32"),
        ("key_begin", lambda x: x.flip(0), "key_begin must rise"),
        ("slots", lambda x: x + 4000, "slots name some that key does not have"),
        ("slots", lambda x: x.long(), "slots must be int32"),
        ("window", lambda x: 0, "window=0: must be at least 1"),
    ],
)
def test_bad_arguments(name: str, change: Any, words: str) -> None:
    given = arguments(Case())
    given[name] = change(given[name])
    with pytest.raises((ValueError, RuntimeError), match=words):
        paged_attention(**given)


def test_more_queries_than_keys() -> None:
    given = arguments(Case(lengths=((3, 2), (1, 9))))
    with pytest.raises(RuntimeError, match="sequence 0 has more queries than keys"):
        paged_attention(**given)
