import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn
from torch.nn import functional

from hf_cpu_accel import accelerate_for_cpu, restore
from hf_cpu_accel.lazy.lazy_weight import LazyWeight
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.linear.match import pack


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 64)
        self.first = nn.Linear(64, 48)
        self.second = nn.Linear(48, 64, bias=False)

    def forward(self, ids):
        return self.second(self.first(self.embedding(ids)))


@pytest.fixture
def model():
    return Model().eval()


@pytest.fixture
def ids():
    return torch.arange(6).view(2, 3)


def test_weight_has_the_originals_shape_and_dtype_without_being_unpacked():
    linear = nn.Linear(64, 48, dtype=torch.bfloat16)
    weight = pack([linear], "int8")[0].weight
    assert isinstance(weight, LazyWeight)
    assert (weight.shape, weight.dtype, weight.device) == (
        linear.weight.shape,
        torch.bfloat16,
        linear.weight.device,
    )
    assert not weight.requires_grad


def test_weight_computes_like_the_original():
    linear = nn.Linear(64, 48)
    packed, input = pack([linear], "float32")[0], torch.randn(3, 64)
    assert torch.equal(functional.linear(input, packed.weight, packed.bias), linear(input))
    assert all(torch.equal(a, b) for a, b in zip(packed.weight.chunk(3), linear.weight.chunk(3), strict=True))
    assert repr(packed.weight).startswith("LazyWeight(")


def test_weight_is_read_only():
    packed = pack([nn.Linear(64, 48)], "float32")[0]
    with pytest.raises(RuntimeError, match="packed and read-only"):
        packed.weight.add_(1)
    with pytest.raises(RuntimeError, match="packed and read-only"):
        packed.weight.data = torch.zeros(48, 64)
    with pytest.raises(RuntimeError, match="packed and read-only"):
        packed.weight = torch.zeros(48, 64)


def test_works_where_gradients_are_recorded_but_none_is_asked_for(model, ids):
    accelerate_for_cpu(model, dtype="float32")
    assert not model(ids).requires_grad
    restore(model)
    assert model(ids).requires_grad


def test_a_gradient_that_is_asked_for_is_refused(model):
    accelerate_for_cpu(model, dtype="float32")
    with pytest.raises(RuntimeError, match="requires a gradient"):
        model.first(torch.randn(2, 64, requires_grad=True))
    with torch.no_grad():
        assert model.first(torch.randn(2, 64, requires_grad=True)).shape == (2, 48)


def test_training_mode_is_refused(model, ids):
    accelerate_for_cpu(model, dtype="float32")
    model.train()
    with pytest.raises(RuntimeError, match=r"model\.eval\(\)"):
        model(ids)
    assert model.eval()(ids).shape == (2, 3, 64)


def test_loading_is_refused_before_anything_is_loaded(model):
    values = {name: value + 1 for name, value in model.state_dict().items()}
    accelerate_for_cpu(model, dtype="float32")
    before = model.embedding.weight.clone()
    for part in (model, model.first):
        with pytest.raises(RuntimeError, match="restore"):
            part.load_state_dict({k: v for k, v in values.items() if part is model}, strict=False)
    assert torch.equal(model.embedding.weight, before)
    restore(model).load_state_dict(values)
    assert torch.equal(model.embedding.weight, before + 1)


@pytest.mark.parametrize("dtype", ["float32", "int8", "int8-weight", "int4"])
def test_a_cast_leaves_the_packed_weight_and_reaches_the_rest(model, ids, dtype):
    expected = model(ids)
    accelerate_for_cpu(model, dtype=dtype)
    packed = model.first.packed.data.clone()
    model.to(torch.bfloat16)
    output = model(ids)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=0.1, atol=0.3 if dtype == "int4" else 0.05)
    assert torch.equal(model.first.packed.data, packed)
    assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16}
    restore(model)
    assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16}
    assert model(ids).dtype == torch.bfloat16


def test_a_move_to_another_device_is_refused(model):
    accelerate_for_cpu(model, dtype="float32")
    with pytest.raises(RuntimeError, match="an accelerated model cannot be moved to 'meta'"):
        model.first.to("meta")
    assert model.first.bias.device.type == "cpu"


def test_the_bias_is_the_original_parameter(model):
    bias = model.first.bias
    accelerate_for_cpu(model, dtype="float32")
    assert isinstance(model.first, PackedLinear)
    assert model.first.bias is bias
    registered = dict(model.named_parameters(remove_duplicate=False))
    assert registered.keys() == {"embedding.weight", "first.bias"}


def test_bfloat16_models(ids):
    model = Model().eval().to(torch.bfloat16)
    expected = model(ids)
    for dtype in ("float32", "bfloat16", "int8", "int8-weight", "int4"):
        accelerate_for_cpu(model, dtype=dtype)
        assert isinstance(model.first, PackedLinear)
        output = model(ids)
        assert output.dtype == torch.bfloat16
        torch.testing.assert_close(output, expected, rtol=0.1, atol=0.3 if dtype == "int4" else 0.05)
    assert torch.equal(restore(model)(ids), expected)


class Tied(nn.Module):
    """One linear at two paths, as in an autoencoder with tied weights."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(32, 48, bias=False)
        self.decoder = nn.ModuleList([self.encoder])

    def forward(self, x):
        return self.decoder[0](x)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_linear_at_two_paths_is_saved_once(dtype, tmp_path):
    model = accelerate_for_cpu(Tied().eval(), dtype=dtype)
    state = model.state_dict()
    assert state["encoder.weight"].data_ptr() == state["decoder.0.weight"].data_ptr()
    assert model.state_dict()["encoder.weight"].data_ptr() != state["encoder.weight"].data_ptr()
    save_model(model, tmp_path / "model.safetensors")
    loaded = Tied()
    load_model(loaded, tmp_path / "model.safetensors")
    assert torch.equal(loaded.encoder.weight, state["encoder.weight"])
