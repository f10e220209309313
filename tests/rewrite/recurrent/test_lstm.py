"""`nn.LSTM`, compared with torch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.recurrent.lstm import STRUCTURE
from tests.rewrite.convolution.test_as_linear import BOUNDS

CASES: dict[str, dict[str, Any]] = {
    "one layer": {"input_size": 40, "hidden_size": 128},
    "as codecs have it": {"input_size": 128, "hidden_size": 128, "num_layers": 2},
    "both directions": {"input_size": 33, "hidden_size": 130, "num_layers": 2, "bidirectional": True},
    "projected": {
        "input_size": 40,
        "hidden_size": 192,
        "num_layers": 3,
        "proj_size": 50,
        "batch_first": True,
    },
    "without biases": {"input_size": 64, "hidden_size": 160, "bias": False, "bidirectional": True},
}


class Speaker(nn.Module):
    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(**sizes)

    def forward(self, *given: Any) -> Any:
        return self.lstm(*given)


def _made(case: str, dtype: str) -> tuple[Speaker, Speaker]:
    torch.manual_seed(0)
    eager = Speaker(**CASES[case]).eval()
    model = copy.deepcopy(eager)
    accelerate_for_cpu(model, dtype=dtype)
    assert explain(model).counts() == {STRUCTURE: 1}
    return eager, model


def _states(lstm: nn.LSTM, *batch: int) -> tuple[Tensor, Tensor]:
    count = lstm.num_layers * (2 if lstm.bidirectional else 1)
    sizes = (lstm.proj_size or lstm.hidden_size, lstm.hidden_size)
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randn(count, *batch, size, generator=generator) for size in sizes)
    return first, second


def _agree(ours: Any, theirs: Any, bound: float) -> None:
    """Compare the outputs and both states: they lie within (-1, 1) or near it, so the error is relative to 1."""
    for one, other in zip((ours[0], *ours[1]), (theirs[0], *theirs[1]), strict=True):
        assert one.shape == other.shape
        assert (one.float() - other).abs().max() <= bound


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_an_lstm(case: str, dtype: str, threads: int) -> None:
    eager, model = _made(case, dtype)
    lstm, bound = eager.lstm, BOUNDS[dtype]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for length, batch in ((9, 3), (1, 1), (4, 15)):
        rows = torch.randn(length, batch, lstm.input_size)
        given = rows.transpose(0, 1) if lstm.batch_first else rows
        _agree(model(given), eager(given), bound)
        states = _states(lstm, batch)
        kept = [state.clone() for state in states]
        _agree(model(given, states), eager(given, states), bound)
        assert all(map(torch.equal, states, kept))
    alone = torch.randn(5, lstm.input_size)
    _agree(model(alone), eager(alone), bound)
    _agree(model(alone, _states(lstm)), eager(alone, _states(lstm)), bound)
    torch.set_num_threads(before)
    ours = model(alone)[0]
    assert torch.equal(pickle.loads(pickle.dumps(model))(alone)[0], ours)
    assert torch.equal(copy.deepcopy(model)(alone)[0], ours)
    assert isinstance(model.lstm, nn.LSTM)
    assert all(map(torch.equal, model.state_dict().values(), eager.state_dict().values()))
    restore(model)
    assert torch.equal(model(alone)[0], eager(alone)[0])


@torch.no_grad()
def test_an_lstm_in_bfloat16() -> None:
    torch.manual_seed(0)
    eager = Speaker(**CASES["projected"]).eval()
    model = copy.deepcopy(eager).bfloat16()
    accelerate_for_cpu(model, dtype="bfloat16")
    rows = torch.randn(2, 9, 40).bfloat16()
    output, states = model(rows)
    assert {output.dtype, *(state.dtype for state in states)} == {torch.bfloat16}
    _agree((output, states), eager(rows.float()), 2e-2)


@torch.no_grad()
def test_what_an_lstm_takes_besides() -> None:
    eager, model = _made("one layer", "int8")
    rows = torch.randn(6, 2, 40)
    packed = rnn.pack_padded_sequence(rows, [6, 4])
    ours, theirs = model(packed), eager(packed)
    assert torch.equal(ours[0].data, theirs[0].data)  # torch's own, over the same parameters
    for wrong in (rows[..., :-1], rows[None], rows.double()):
        with pytest.raises((RuntimeError, ValueError)):
            model(wrong)
    with pytest.raises(RuntimeError, match="hidden"):
        model(rows, _states(eager.lstm, 3))
    with pytest.raises(TypeError):
        model()


@torch.no_grad()
def test_many_rows_in_floating_point_are_left_to_torch() -> None:
    eager, model = _made("one layer", "float32")
    many, few = torch.randn(513, 1, 40), torch.randn(512, 1, 40)
    assert torch.equal(model(many)[0], eager(many)[0])
    assert not torch.equal(model(few)[0], eager(few)[0])  # another order of sums
    eager, model = _made("projected", "float32")
    many, few = torch.randn(17, 3, 40), torch.randn(16, 3, 40)
    assert torch.equal(model(many)[0], eager(many)[0])
    assert not torch.equal(model(few)[0], eager(few)[0])
    eager, model = _made("one layer", "int8")
    assert not torch.equal(model(torch.ones(513, 1, 40))[0], eager(torch.ones(513, 1, 40))[0])


@torch.no_grad()
def test_writes_to_an_lstm() -> None:
    eager, model = _made("one layer", "float32")
    rows = torch.randn(6, 2, 40)
    for each in (eager, model):
        each.lstm.bias_hh_l0.add_(0.5)
    _agree(model(rows), eager(rows), BOUNDS["float32"])
    model.lstm.weight_hh_l0.add_(0.5)
    with pytest.raises(RuntimeError, match="weight_hh_l0 was modified"):
        model(rows)


@torch.no_grad()
def test_hooks_and_small_ones() -> None:
    _, model = _made("one layer", "int8")
    rows, seen = torch.randn(6, 2, 40), []
    model.lstm.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    output = model(rows)[0]
    assert seen[0] is output
    small = Speaker(input_size=40, hidden_size=32).eval()
    accelerate_for_cpu(small, dtype="int8")
    (item,) = (item for item in explain(small).items if item.reason is not None)
    assert "recurrent network" in item.reason


def test_gradients_are_refused() -> None:
    _, model = _made("one layer", "float32")
    with pytest.raises(RuntimeError, match="requires a gradient"):
        model(torch.randn(6, 2, 40, requires_grad=True))
