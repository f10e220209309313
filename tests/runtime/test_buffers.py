"""The memory of outputs is kept, reused and given back."""

from __future__ import annotations

import copy
import pickle

import torch

from hf_cpu_accel.ops.linear import linear
from hf_cpu_accel.packing import pack_linear
from hf_cpu_accel.runtime.memory import release_buffers


def run(rows: int = 300) -> torch.Tensor:
    return linear(torch.ones(rows, 16), pack_linear(torch.ones(1024, 16), "float32"))


def test_equal_calls_take_the_same_memory() -> None:
    """glibc's memalign may hand out new memory each time: a loop then grows the heap without end."""
    assert len({run().data_ptr() for _ in range(20)}) <= 2


def test_a_tensor_in_use_is_not_overwritten() -> None:
    first = run()
    view = first[5:7]
    del first
    second = run().zero_()
    assert view.data_ptr() != second[5:7].data_ptr()
    assert torch.equal(view, torch.full((2, 1024), 16.0))


def test_idle_memory_can_be_given_back() -> None:
    output = run()
    release_buffers()
    assert release_buffers() == 0
    expected = output.nbytes
    del output
    assert release_buffers() >= expected
    assert torch.equal(run(), torch.full((300, 1024), 16.0))


def test_outputs_are_ordinary_tensors() -> None:
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            output = run(3)
            expected = torch.full((3, 1024), 16.0)
            assert output.is_inference() == (context is torch.inference_mode)
            assert torch.equal(copy.deepcopy(output), expected)
            assert torch.equal(pickle.loads(pickle.dumps(output)), expected)
            assert torch.equal(output.add_(1), expected + 1)
            assert output.data_ptr() % 64 == 0
