"""The rows that linears are given: all of them, under their paths, and a sample that is the same in every run."""

import pytest
import torch
from torch import nn

from hf_cpu_accel.measure.layer_inputs import RowSample, layer_inputs, linears_of


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).eval()


def test_rows_are_those_that_the_layers_multiply():
    model, seen = small(), {}
    input = torch.randn(2, 4, 5)
    with torch.no_grad(), layer_inputs(linears_of(model), lambda path, _, rows: seen.update({path: rows})):
        model(input)
    assert torch.equal(seen["0"], input.reshape(8, 5))
    assert torch.equal(seen["2"], model[1](model[0](input)).reshape(8, 7))


def test_no_hook_stays_where_the_model_raises():
    model = small()
    with pytest.raises(RuntimeError), layer_inputs(linears_of(model), RowSample()):
        model(torch.randn(2, 6))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_sample_is_spread_over_calls_and_never_more_than_asked_for():
    model, sample = small(), RowSample(most=10, of_call=4)
    calls = [torch.full((9, 5), float(number)) for number in range(5)]
    with torch.no_grad(), layer_inputs(linears_of(model), sample):
        for call in calls:
            model(call)
    rows = sample.rows()["0"]
    assert rows[:, 0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert sample.seen == {"0": 45, "2": 45}
    assert len(sample.rows()["2"]) == 10


def test_the_sample_is_a_copy():
    linear, sample = nn.Linear(3, 2), RowSample()
    input = torch.ones(4, 3)
    with layer_inputs({"linear": linear}, sample):
        linear(input)
    input.zero_()
    assert sample.rows()["linear"].eq(1).all()


def test_transposed_linears_of_transformers_count():
    from transformers.pytorch_utils import Conv1D

    model = nn.ModuleDict({"up": Conv1D(6, 4), "norm": nn.LayerNorm(4), "table": nn.Embedding(3, 4)})
    assert list(linears_of(model)) == ["up"]


def test_one_that_is_called_by_its_keyword():
    linear, sample = nn.Linear(3, 2), RowSample()
    with layer_inputs({"linear": linear}, sample):
        linear(input=torch.ones(4, 3))
    assert sample.rows()["linear"].shape == (4, 3)
