"""attention over all its forms of masks, paged_attention and deformable_attention."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from hf_cpu_accel.ops.attention import attention_reference
from hf_cpu_accel.ops.deformable_attention import deformable_attention_reference
from hf_cpu_accel.ops.kv_cache import to_storage
from hf_cpu_accel.ops.paged_attention import paged_attention_reference
from tests.ops.attention_cases import MASKS, Case, inputs
from tests.ops.fuzz import draw
from tests.ops.fuzz.call import Call
from tests.ops.test_attention import BFLOAT16_ROUNDING, FLOAT32_BOUND, PROBABILITY_ROUNDING
from tests.ops.test_deformable_attention import BOUND as DEFORMABLE_BOUND
from tests.ops.test_deformable_attention import inputs as deformable_inputs
from tests.ops.test_paged_attention import BOUNDS
from tests.ops.test_paged_attention import Case as PagedCase
from tests.ops.test_paged_attention import arguments as paged_arguments
from tests.ops.test_paged_attention import flat as paged_flat


def attention(rng: random.Random) -> Call:
    kv_heads = rng.randint(1, 3)
    case = Case(
        batch=rng.randint(1, 3),
        heads=kv_heads * rng.randint(1, 3),
        kv_heads=kv_heads,
        q_len=rng.choice((0, 1, 1, 2, rng.randint(1, 70))),
        kv_len=rng.choice((0, 1, rng.randint(1, 70), rng.randint(1, 600))),
        head_dim=draw.size(rng),
        value_dim=draw.size(rng),
        mask=rng.choice(MASKS),
        causal=rng.random() < 0.5,
        scale=rng.choice((None, None, 0.3, -1.0)),
        softcap=rng.choice((None, None, None, 0.7, 30.0)),
        dtype=draw.floats(rng),
    )
    query, key, value, mask = inputs(case, rng.randrange(2**31))
    if case.mask == "lowest float" and case.causal and case.kv_len < case.q_len:
        mask = None  # a row of -3.4e38 and -inf: torch's own sum of a score and the lowest float may be -inf
    cache = rng.choice((case.dtype, case.dtype, torch.float32, torch.bfloat16, torch.int8))
    key, value = (to_storage(x.float(), cache) if cache is not case.dtype else x for x in (key, value))
    # The reference's probabilities are float32 and its values weigh at most 1: what rounding probabilities to 8 bits may add.
    bound = FLOAT32_BOUND + (BFLOAT16_ROUNDING + 2 * PROBABILITY_ROUNDING) * (case.dtype is torch.bfloat16)
    arguments = [query, key, value, mask, *case.how]
    return Call("attention", arguments, attention_reference, bound, notes=[str(case)], hides=True)


def paged_attention(rng: random.Random) -> Call:
    def lengths() -> tuple[int, int]:
        queries = rng.choice((0, 1, 1, rng.randint(1, 40)))
        return queries, queries + rng.choice((0, rng.randint(0, 40), rng.randint(0, 300)))

    kv_heads, dtype = rng.randint(1, 3), draw.floats(rng)
    case = PagedCase(
        lengths=tuple(lengths() for _ in range(rng.randint(1, 4))),
        heads=kv_heads * rng.randint(1, 3),
        kv_heads=kv_heads,
        head_dim=draw.size(rng),
        value_dim=draw.size(rng),
        dtype=dtype,
        cache=rng.choice((dtype, torch.float32, torch.bfloat16, torch.int8)),
        window=rng.choice((None, None, 1, rng.randint(1, 50))),
    )
    arguments: list[Tensor | float] = list(paged_flat(paged_arguments(case)))
    bound = 4 * BOUNDS[dtype]
    return Call("paged_attention", arguments, paged_attention_reference, bound, notes=[str(case)], hides=True)


def deformable_attention(rng: random.Random) -> Call:
    levels = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(rng.randint(1, 4))]
    counts = [rng.randint(0, 5) for _ in levels]
    sizes = (rng.randint(0, 3), rng.randint(0, 20), rng.randint(1, 4), draw.size(rng, 70))
    value, _, _, *others = deformable_inputs(*sizes, levels, counts, draw.floats(rng), rng.randrange(10_000))
    arguments = [value, [side for level in levels for side in level], counts, *others]
    bound = DEFORMABLE_BOUND + draw.rounding(value)
    return Call("deformable_attention", arguments, deformable_attention_reference, bound, hides=True)


FAMILY = (attention, attention, paged_attention, deformable_attention)
