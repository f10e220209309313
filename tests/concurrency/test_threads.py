"""One accelerated model is called by several threads at once, from its first call on: each gets the answer to its request."""

from __future__ import annotations

import threading

import pytest
import torch

from benchmarks.soak.clients import Clients
from benchmarks.soak.served import SERVED, Served
from hf_cpu_accel import accelerate_for_cpu, explain

_REQUESTS = {"encoder": 400, "decoder": 120, "unet": 24, "gnn": 400}
_models = {}


def asked(name, dtype):
    """A kind of model, its answers as one thread gets them, and a model that nobody has called yet."""
    served = SERVED[name]
    key = name, dtype
    if key not in _models:
        model = accelerate_for_cpu(served.build(), dtype=dtype, threads=1)
        _models[key] = [served.answer(model, number) for number in range(9)]
    return served, _models[key], accelerate_for_cpu(served.build(), dtype=dtype, threads=1)


@pytest.mark.parametrize(
    ("name", "dtype", "threads"),
    [
        ("encoder", "float32", 4),
        ("encoder", "int8", 8),
        ("decoder", "float32", 8),
        ("decoder", "int8", 4),
        ("unet", "bfloat16", 8),
        ("gnn", "float32", 4),
        ("gnn", "float32", 8),
    ],
)
def test_every_answer_is_right(name, dtype, threads):
    served, answers, model = asked(name, dtype)
    clients = Clients(served, model, answers, threads).ask(lambda number: number < _REQUESTS[name])
    assert clients.failures == []
    assert clients.answered == _REQUESTS[name]
    assert all("first call" not in (item.reason or "") for item in explain(model).items)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_all_hand_over_the_same_tensors(mode):
    """As where a server keeps the mask of its longest text: what is remembered of it serves all of them."""
    served, _, model = asked("decoder", "float32")
    with mode():
        request = served.request(2)
        expected = served.call(model, request)
    same = Served(served.build, lambda number: request, served.call, exact=True)
    clients = Clients(same, model, [expected], 8).ask(lambda number: number < 80)
    assert clients.failures == []


def test_a_weight_is_written_while_clients_are_served():
    """A call sees the bias before or after, and calls after the writing see what was written."""
    served, _, model = asked("encoder", "float32")
    before = served.answer(model, 0)
    bias = model.encoder.layer[0].attention.self.query.bias
    done, wrong = threading.Event(), []
    with torch.no_grad():
        other = accelerate_for_cpu(served.build(), dtype="float32", threads=1)
        other.encoder.layer[0].attention.self.query.bias.add_(1)
        after = served.answer(other, 0)
    assert not served.agrees(after, before)

    def ask():
        torch.set_num_threads(1)
        while not done.is_set():
            try:
                answer = served.answer(model, 0)
            except Exception as error:
                wrong.append(repr(error))
                return
            if not served.agrees(answer, before) and not served.agrees(answer, after):
                wrong.append("neither")

    clients = [threading.Thread(target=ask) for _ in range(4)]
    for client in clients:
        client.start()
    try:
        for _ in range(20):
            served.answer(model, 0)
        with torch.no_grad():
            bias.add_(1)
        for _ in range(20):
            assert served.agrees(served.answer(model, 0), after)
    finally:
        done.set()
        for client in clients:
            client.join()
    assert wrong == []
