"""KeptValues: every way to write to a tensor is seen, and nothing else."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel.guard import values as module
from hf_cpu_accel.guard.values import KeptValues, sampled


@pytest.fixture(params=["kernel", "reference"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "reference":
        monkeypatch.setattr(module, "can_keep", lambda what: False)
    return str(request.param)


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = [(0,), (1,), (3, 5, 2), (), (4096,), (7,)]
    made = [torch.randn(shape).to(dtype) for shape in shapes]
    strided = torch.randn(6, 8).to(dtype).t()
    return [nn.Parameter(tensor) for tensor in (*made, strided, torch.randn(64).to(dtype)[::4])]


def _numpy(tensor: Tensor) -> None:
    tensor.detach().numpy()[..., -1] += 1.0


def _data(tensor: Tensor) -> None:
    tensor.data = tensor.data.clone() + 1


def _half(tensor: Tensor) -> None:
    tensor.data = tensor.data.half()


def _longer(tensor: Tensor) -> None:
    tensor.data = torch.cat([tensor.data.flatten(), torch.zeros(1)])


@pytest.mark.parametrize("edit", [_numpy, _data, _half, _longer, lambda t: t.data.neg_()])
def test_edits_of_each_tensor_are_seen(edit: Callable[[Tensor], object]) -> None:
    for number in (1, 2, 4, 5, 6, 7):
        held = tensors()
        kept = KeptValues(held)
        assert kept.are_held()
        edit(held[number])
        assert not kept.are_held()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_element_is_compared(threads: int) -> None:
    held = [torch.zeros(size) for size in (1, 700, 30, 2000)]
    kept = KeptValues(held)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for tensor in held:
            for place in {0, 1, tensor.numel() // 3, tensor.numel() // 2, tensor.numel() - 1} & {
                *range(tensor.numel())
            }:
                tensor[place] = 1.0
                assert not kept.are_held()
                tensor[place] = 0.0
                assert kept.are_held()
    finally:
        torch.set_num_threads(before)


def test_values_are_compared_bit_by_bit() -> None:
    held = [torch.tensor([torch.nan, 0.0])]
    kept = KeptValues(held)
    assert kept.are_held()
    held[0][1] = -0.0
    assert not kept.are_held()


def test_memory_that_is_exchanged_for_the_same_values_is_read() -> None:
    held = tensors(torch.bfloat16)
    kept = KeptValues(held)
    for tensor in held:
        tensor.data = tensor.data.clone()
    assert kept.are_held()
    held[4].data[7] += 1
    assert not kept.are_held()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_copies_go_on_from_the_same_values(copied: Callable[..., tuple[list[Tensor], KeptValues]]) -> None:
    held = tensors()
    both = copied((held, KeptValues(held)))
    assert both[1].are_held()
    held[4].data.add_(1)
    assert both[1].are_held()
    both[0][4].data.add_(1)
    assert not both[1].are_held()
    assert not copied(both)[1].are_held()


def test_threads_may_ask_at_once() -> None:
    held = tensors()
    kept = KeptValues(held)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: kept.are_held(), range(200)))


def test_what_is_dropped_is_released(implementation: str) -> None:
    model = nn.Linear(3, 3)
    model.watch = KeptValues(list(model.parameters()))  # type: ignore[assignment]
    model.itself = [model]  # type: ignore[assignment]
    kept, gone = model.watch._kept, weakref.ref(model.weight)
    number = kept and kept.number
    del model, kept
    gc.collect()
    assert gone() is None
    if implementation == "kernel":
        with pytest.raises(RuntimeError, match=f"nothing is kept under the number {number}"):
            torch.ops.hf_cpu_accel.have_values(number)
        assert not torch.ops.hf_cpu_accel.drop_values(number)


def test_dtypes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must have one dtype, got \['torch.bfloat16', 'torch.float32'\]"):
        KeptValues([torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)])


@pytest.mark.parametrize("shape", [(768, 768), (64, 3072), (3000, 48), (64, 64, 3, 3), (20000,)])
@pytest.mark.parametrize("step", [47, 64, 767, 768])
def test_samples_are_of_each_column_in_turn(shape: tuple[int, ...], step: int) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    samples = sampled(tensor, step)
    columns = 1 if len(shape) == 1 else math.prod(shape[1:])
    assert samples.data_ptr() == tensor.data_ptr()
    assert len(samples) >= tensor.numel() // step
    assert len(set((samples % columns).tolist())) == min(len(samples), columns)
    if columns > step:
        assert len(set((samples // columns).tolist())) == shape[0]


def test_samples_of_memory_with_gaps_and_of_channels_last() -> None:
    whole = torch.arange(64 * 96).reshape(64, 96)
    assert torch.equal(sampled(whole[:, :80], 79), whole.diagonal())
    image = torch.arange(64 * 64 * 9).reshape(64, 64, 3, 3).to(memory_format=torch.channels_last)
    samples = sampled(image, 575)
    assert samples.data_ptr() == image.data_ptr()
    assert len(set((samples // 576).tolist())) == 64
    assert torch.equal(sampled(whole.t(), 95), sampled(whole, 95))
