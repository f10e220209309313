"""Values that processes hand to one another, through shared memory and by gloo: all get the same, and nobody waits for the dead."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_cpu_accel.runtime import exchange as module
from hf_cpu_accel.runtime.exchange import Exchange

FORK = multiprocessing.get_context("fork")
PATIENCE = 120


def run(work: Callable[[Exchange], Any], size: int, file: Path) -> list[Any]:
    """What `work` gives in each of `size` processes; of one that fails the message, and None of one that gives nothing."""
    answers = FORK.SimpleQueue()

    def process(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
        try:
            answers.put((rank, work(Exchange())))
        except RuntimeError as error:
            answers.put((rank, str(error)))

    processes = [FORK.Process(target=process, args=(rank,)) for rank in range(size)]
    for each in processes:
        each.start()
    for each in processes:
        each.join(PATIENCE)
        hung = each.exitcode is None
        each.kill()
        assert not hung
    found: list[Any] = [None] * size
    while not answers.empty():
        rank, answer = answers.get()
        found[rank] = answer
    return found


def of_rank(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("capacity", [1 << 20, 4], ids=["shared", "gloo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_parts(
    dtype: torch.dtype, capacity: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three processes, over and over, in changing shapes; the inputs stay as they were where memory is shared."""
    monkeypatch.setattr(module, "_CAPACITY", capacity)
    shapes = [(1, 1, 7), (3, 5), (2, 64)]

    def turn(exchange: Exchange) -> list[torch.Tensor]:
        made = []
        for shape in shapes:
            mine = of_rank(exchange.rank, shape, dtype)
            made += [exchange.sum(mine.clone()), exchange.side_by_side(mine)]
        return made

    def work(exchange: Exchange) -> list[list[float]]:
        made = turn(exchange)
        assert exchange.is_shared
        assert all(tensor.dtype is dtype for tensor in made)
        assert all(all(map(torch.equal, made, turn(exchange))) for _ in range(20))
        return [tensor.float().flatten().tolist() for tensor in made]

    first, *others = run(work, 3, tmp_path / "file")
    assert all(other == first for other in others)
    for number, shape in enumerate(shapes):
        parts = [of_rank(rank, shape, dtype) for rank in range(3)]
        total, whole = (torch.tensor(first[2 * number + place]) for place in (0, 1))
        torch.testing.assert_close(total, sum(part.float() for part in parts).flatten(), rtol=2e-2, atol=2e-2)
        assert torch.equal(whole, torch.cat(parts, dim=-1).float().flatten())


def test_float64_keeps_its_digits(tmp_path: Path) -> None:
    digits = 1 + 2**-40

    def work(exchange: Exchange) -> list[list[float]]:
        mine = torch.full((2,), digits, dtype=torch.float64)
        return [exchange.side_by_side(mine).tolist(), exchange.sum(mine).tolist()]

    assert run(work, 2, tmp_path / "file") == [[[digits] * 4, [2 * digits] * 2]] * 2


def test_nobody_waits_for_a_process_that_has_ended(tmp_path: Path) -> None:
    def work(exchange: Exchange) -> None:
        if exchange.rank == 1:
            os._exit(0)
        exchange.sum(torch.ones(4))

    found = run(work, 2, tmp_path / "file")
    assert "(rank 1) of the group has exited" in found[0]


def test_other_machines_share_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_machine", lambda: str(os.getpid()))

    def work(exchange: Exchange) -> tuple[bool, list[float]]:
        return exchange.is_shared, exchange.sum(torch.full((3,), 1.0 + exchange.rank)).tolist()

    assert run(work, 2, tmp_path / "file") == [(False, [3.0] * 3)] * 2
