import pytest
import torch
from torch import nn

from hf_cpu_accel import accelerate_for_cpu, explain


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.BatchNorm1d(32))


def _training():
    model = Model().eval()
    model.layer[1].train()
    return model


def _lazy():
    model = Model()
    model.layer[0] = nn.LazyLinear(32)
    return model.eval()


def _not_finite(value):
    model = Model().eval()
    with torch.no_grad():
        model.layer[0].weight[3, 4] = value
    return model


def _meta_buffer():
    model = Model().eval()
    model.layer[2].running_mean = torch.empty(32, device="meta")
    return model


BAD = {
    r"Model is in training mode.*model\.eval\(\)": Model(),
    r"its module 'layer\.1' is in training mode": _training(),
    r"layer\.0\.weight is not initialized yet: run the model once": _lazy(),
    r"layer\.0\.weight is on the meta device and has no values": Model().eval().to("meta"),
    r"layer\.2\.running_mean is on the meta device": _meta_buffer(),
    r"layer\.0\.weight has NaN or infinite values": _not_finite(torch.nan),
    r"layer\.0\.weight has NaN or infinite": _not_finite(-torch.inf),
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_accelerated_is_named_with_the_remedy(message):
    model = BAD[message]
    modules = list(model.modules())
    with pytest.raises(ValueError, match="target: .*" + message):
        accelerate_for_cpu(model)
    assert list(model.modules()) == modules
    assert explain(model).items == ()


def test_finite_weights_whose_sum_overflows_are_fine():
    model = Model().eval()
    with torch.no_grad():
        model.layer[0].weight.fill_(3e38)
    accelerate_for_cpu(model, dtype="float32", verify=False)


def test_another_device_is_named(monkeypatch):
    model = Model().eval()
    # No other device can be counted on here, so a parameter pretends.
    monkeypatch.setattr(nn.Parameter, "device", torch.device("cuda:0"), raising=False)
    with pytest.raises(
        ValueError, match=r"layer\.0\.weight is on 'cuda:0', only 'cpu' is supported: call model\.to\('cpu'\)"
    ):
        accelerate_for_cpu(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_inputs_at_the_edges_behave_as_in_eager(dtype):
    model = nn.ModuleDict({
        "linear": nn.Linear(32, 32), "ffn": nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)),
        "act": nn.Sequential(nn.Linear(32, 32), nn.Tanh()), "norm": nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)),
    }).eval()  # fmt: skip
    nan = torch.randn(2, 3, 32)
    nan[0, 1, 5] = torch.nan
    inputs = [torch.empty(0, 3, 32), torch.empty(2, 0, 32), nan]
    expected = {name: [part(input) for input in inputs] for name, part in model.items()}
    accelerate_for_cpu(model, dtype=dtype)
    for name, part in model.items():
        for input, eager in zip(inputs, expected[name], strict=True):
            output = part(input)
            assert output.shape == eager.shape
            assert torch.equal(output.isnan().any(-1), eager.isnan().any(-1)), name
