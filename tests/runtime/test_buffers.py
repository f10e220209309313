"""The memory of outputs is kept, reused and given back."""

from __future__ import annotations

import copy
import pickle

import torch
import transformers as tf

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.ops.linear import linear
from hf_cpu_accel.packing.linear import pack_linear
from hf_cpu_accel.runtime.memory import buffer_allocations, release_buffers


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


def test_a_warm_model_takes_nothing_from_the_system() -> None:
    """Whatever the order of lengths and threads, once the model has seen them the pool serves all."""
    config = tf.BertConfig(
        vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128
    )
    model = accelerate_for_cpu(tf.BertModel(config, add_pooling_layer=False).eval(), dtype="int8")

    def forward(batch: int, length: int) -> None:
        mask = (torch.arange(length) < torch.tensor([[length], [1 + length // 2]])[:batch]).long()
        with torch.inference_mode():
            model(input_ids=torch.full((batch, length), 7), attention_mask=mask)

    shapes = [(1, 8), (2, 40), (2, 90), (1, 300)]
    threads = torch.get_num_threads()
    try:
        for count in (2, 1):
            torch.set_num_threads(count)
            for shape in shapes * 2:
                forward(*shape)
        before = buffer_allocations()
        assert before > 0
        for turn in range(60):
            torch.set_num_threads(1 + turn % 2)
            forward(*shapes[turn % len(shapes)])
        assert buffer_allocations() == before
    finally:
        torch.set_num_threads(threads)
