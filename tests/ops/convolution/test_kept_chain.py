"""What the library keeps of a chain from call to call: no answer is of another image, another shape or memory that is gone."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor

from hf_cpu_accel.ops.convolution_chain import BoundConvolutions, bind, convolutions
from tests.ops.convolution.chain_cases import chain, stem
from tests.ops.convolution.test_images_in_bytes import Step, bottleneck, ranged, step, tiles
from tests.ops.convolution.test_images_in_bytes import stem as mixed

OPS = torch.ops.hf_cpu_accel
CHAINS: dict[str, Callable[[random.Random], list[Step]]] = {
    **{dtype: partial(chain, dtype, channels=64) for dtype in ("float32", "bfloat16", "int8")},  # type: ignore[dict-item]
    "photos": partial(stem, "int8", channels=64),
    "bytes": bottleneck,
    "tiles": tiles,
    "mixed": mixed,
    "adds its input": lambda rng: [step(0, (64, 64)), step(1, (64, 64), 3), step(2, (64, 64), residual=0)],
}


def alone(image: Tensor, bound: BoundConvolutions) -> Tensor:
    """By the op that keeps nothing."""
    rows = image.permute(0, 2, 3, 1)
    return OPS.convolutions(rows, bound.parts, bound.layout, bound.narrow).permute(0, 3, 1, 2)


def images(*sizes: tuple[int, int, int], channels: int = 64) -> list[Tensor]:
    """Of ranges that differ, and in several orders."""
    made = []
    for number, (batch, height, width) in enumerate(sizes):
        image = 10 ** (2 - number % 5) * torch.randn(batch, channels, height, width)
        made.append(image.contiguous(memory_format=torch.channels_last) if number % 2 else image)
    return [*made, torch.randn(1, channels, 12, 11).transpose(2, 3)]


@pytest.mark.parametrize("ranges", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_calls_do_not_see_one_another(name: str, ranges: bool) -> None:
    torch.manual_seed(0)
    steps = CHAINS[name](random.Random(0))
    if ranges and name in ("bytes", "tiles"):
        steps = ranged(steps, torch.randn(1, 64, 12, 11))
    bound = bind(steps, narrow=True)
    calls = images((1, 12, 11), (1, 12, 11), (1, 12, 11), (2, 9, 14), (1, 12, 11), (1, 12, 11), (3, 8, 8))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        expected = [alone(image, bound) for image in calls]
        for order in (range(len(calls)), random.Random(1).choices(range(len(calls)), k=20)):
            for number in order:
                assert torch.equal(convolutions(calls[number], bound), expected[number])


def test_outputs_are_not_written_to_again() -> None:
    bound, (one, other, *_) = bind(bottleneck(random.Random(0)), narrow=False), images((1, 9, 9), (1, 9, 9))
    first = convolutions(one, bound)
    before = first.clone()
    convolutions(other, bound)
    assert torch.equal(first, before)


def test_threads_call_at_once() -> None:
    bound = bind(bottleneck(random.Random(0)), narrow=False)
    calls = images(*[(1, 9 + number % 3, 9) for number in range(8)])
    expected = [alone(image, bound) for image in calls]

    def call(number: int) -> bool:
        return torch.equal(convolutions(calls[number % 8], bound), expected[number % 8])

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(call, range(300)))


def test_parts_may_move() -> None:
    """As they do when a process sends them to another one."""
    bound, image = bind(bottleneck(random.Random(0)), narrow=False), torch.randn(1, 64, 9, 9)
    expected = convolutions(image, bound)
    for part in bound.parts:
        part.share_memory_()
        assert torch.equal(convolutions(image, bound), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda bound: pickle.loads(pickle.dumps(bound))])
def test_copies_have_their_own(copied: Callable[[BoundConvolutions], BoundConvolutions]) -> None:
    bound, image = bind(bottleneck(random.Random(0)), narrow=False), torch.randn(1, 64, 9, 9)
    expected, other = convolutions(image, bound), copied(bound)
    assert bound.kept is not None
    assert other.kept is not None
    number = bound.kept.number
    assert other.kept.number != number
    del bound
    assert torch.equal(convolutions(image, other), expected)
    with pytest.raises(RuntimeError, match=f"nothing is kept under the number {number}"):
        OPS.kept_convolutions(image.permute(0, 2, 3, 1), number)
    with pytest.raises(TypeError, match="not copied"):
        copied(other.kept)  # type: ignore[arg-type]


def test_graphs_hold_the_arguments() -> None:
    bound, image = bind(bottleneck(random.Random(0)), narrow=False), torch.randn(1, 64, 9, 9)
    compiled = torch.compile(lambda image: convolutions(image, bound), backend="eager", fullgraph=True)
    assert torch.equal(compiled(image), convolutions(image, bound))
    traced = torch.jit.trace(lambda image: convolutions(image, bound), image, check_trace=False)
    assert "kept_convolutions" not in str(traced.graph)


def test_opcheck() -> None:
    bound = bind(bottleneck(random.Random(0)), narrow=False)
    assert bound.kept is not None
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        OPS.kept_convolutions.default, (torch.randn(1, 9, 9, 64), bound.kept.number), test_utils=tests
    )


def test_bad_inputs_are_refused_as_those_of_the_other_op() -> None:
    bound = bind([step(0, (64, 64)), step(1, (64, 64), 3)], narrow=False)
    convolutions(torch.randn(1, 64, 9, 9), bound)
    for bad, message in (
        (torch.randn(1, 32, 9, 9), "does not fit"),
        (torch.randn(1, 64, 9, 9).double(), "must be float32"),
    ):
        with pytest.raises(RuntimeError, match=message):
            convolutions(bad, bound)
