"""Writes to weights after acceleration take effect at the next call, or raise an error that names the remedy."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, restore
from hf_cpu_accel.check import row_error
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from tests.rewrite.decoder.decoder_families import DECODERS
from tests.rewrite.decoder.llama_stack import accelerated
from tests.rewrite.encoder_families import bert, t5, vit

IDS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def resnet() -> nn.Module:
    sizes = {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1], "layer_type": "basic"}
    model = tf.ResNetModel(tf.ResNetConfig(**sizes)).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "bert": (bert, IDS),
    "t5": (t5, IDS),
    "vit": (vit, PIXELS),
    "resnet": (resnet, PIXELS),
    **{name: (DECODERS[name].build, IDS) for name in ("llama", "gemma2", "gpt2", "mixtral")},
}


def _data(tensor: Tensor, noise: Tensor) -> None:
    tensor.data.add_(noise)


def _exchanged_data(tensor: Tensor, noise: Tensor) -> None:
    tensor.data = tensor.data + noise


def _copied(tensor: Tensor, noise: Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(tensor + noise)


def _numpy(tensor: Tensor, noise: Tensor) -> None:
    values = tensor.detach().numpy()
    values += noise.numpy()


def _initialized(tensor: Tensor, noise: Tensor) -> None:
    # Not a constant: a router would find all experts equally good, and which it takes then is nobody's promise.
    nn.init.uniform_(tensor, -0.25, 0.25, generator=torch.Generator().manual_seed(0))


WAYS = [_data, _exchanged_data, _copied, _numpy, _initialized]


def output(model: nn.Module, call: Tensor) -> Tensor:
    with torch.no_grad():
        return next(value for value in model(call).values() if isinstance(value, Tensor))


def is_refused(edit: Callable[[], object], message: str = "restore") -> bool:
    try:
        edit()
    except (RuntimeError, ValueError) as error:
        if message in str(error) or "read-only" in str(error):
            return True
        raise
    return False


@pytest.mark.parametrize("write", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_every_write_is_taken_in_or_refused(name: str, write: Callable[..., None]) -> None:
    """One parameter or buffer after another, as the model shows them by their paths."""
    build, call = MODELS[name]
    model = build()
    plain = copy.deepcopy(model)
    accelerated(model)
    output(model, call)
    before = output(plain, call)
    taken_in = 0
    for path, theirs in [*plain.named_parameters(), *plain.named_buffers()]:
        if not theirs.is_floating_point() or "inv_freq" in path:
            continue
        owner, _, leaf = path.rpartition(".")
        noise = 0.3 * torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1))
        saved = theirs.detach().clone()
        ours = getattr(model.get_submodule(owner), leaf)
        if is_refused(lambda ours=ours, noise=noise: write(ours, noise)):
            assert row_error(getattr(model.get_submodule(owner), leaf) + 0, saved) <= 1e-5
            continue
        write(theirs, noise)
        if not is_refused(lambda: output(model, call)):
            assert row_error(output(model, call), output(plain, call)) <= 1e-4, path
            taken_in += 1
        for tensor in (ours, theirs):
            tensor.data.copy_(saved)
        assert row_error(output(model, call), before) <= 1e-4, path
    assert taken_in > 3 or name == "resnet"  # whose convolutions and norms are packed together


@pytest.mark.parametrize("name", ["bert", "llama", "gemma2"])
def test_states_of_children_are_loaded_or_refused(name: str) -> None:
    build, call = MODELS[name]
    model, other = build(), build()
    for parameter in other.parameters():
        parameter.data.add_(0.2 * torch.randn(parameter.shape))
    plain = copy.deepcopy(model)
    accelerated(model)
    output(model, call)
    for assign in (False, True):
        for path, theirs in plain.named_modules():
            if list(theirs.children()) or not list(theirs.parameters()):
                continue
            state = copy.deepcopy(other.get_submodule(path).state_dict())
            load = partial(model.get_submodule(path).load_state_dict, state, assign=assign)
            if not is_refused(load):
                theirs.load_state_dict(copy.deepcopy(state), assign=assign)
                assert row_error(output(model, call), output(plain, call)) <= 1e-4, path


def test_views_of_a_packed_weight_are_read_only() -> None:
    model = accelerated(bert())
    linear = next(module for module in model.modules() if isinstance(module, PackedLinear))
    weight, values = linear.weight, linear.unpack()
    writes: list[Callable[[], Any]] = [
        lambda: weight.data.add_(1),
        lambda: weight.data.T[0].zero_(),
        lambda: weight.detach().mul_(2),
        lambda: weight[0].fill_(1),
        lambda: weight.__setitem__((slice(None), 0), 1.0),
        lambda: weight.view(-1).zero_(),
        lambda: weight.numpy().fill(0),
        lambda: weight.data.numpy().fill(0),
        lambda: weight.unbind(0)[1].zero_(),
        lambda: torch.add(values, 1, out=weight.data),
        lambda: nn.init.normal_(weight),
        lambda: setattr(weight, "data", values + 1),
        lambda: setattr(linear, "weight", nn.Parameter(values + 1)),
    ]
    for number, write in enumerate(writes):
        with pytest.raises((RuntimeError, ValueError), match="read-only"):
            write()
        assert torch.equal(linear.weight + 0, values), number
    assert torch.equal(weight.data.T @ torch.eye(len(values)), values.T)
    assert torch.equal(torch.from_numpy(weight.numpy().copy()), values)
    assert torch.equal(copy.deepcopy(weight), values)


@pytest.mark.parametrize("write", WAYS)
def test_a_tied_weight_that_is_written_to_is_refused(write: Callable[..., None]) -> None:
    model = accelerate_for_cpu(DECODERS["gpt2"].build(), dtype="bfloat16")
    tied = model.transformer.wte.weight
    assert isinstance(model.lm_head, PackedLinear)
    assert model.lm_head.weight is tied
    output(model, IDS)
    saved = tied.detach().clone()
    write(tied, torch.full(tied.shape, 0.1))
    with pytest.raises(RuntimeError, match=r"lm_head.weight was modified after acceleration.*restore"):
        output(model, IDS)
    tied.data.copy_(saved)
    output(restore(model), IDS)


@pytest.mark.parametrize("write", WAYS)
def test_a_kept_weight_that_is_written_to_is_refused(write: Callable[..., None]) -> None:
    model = accelerate_for_cpu(bert(), dtype="float32", originals="memory")
    output(model, IDS)
    linear = next(module for module in model.modules() if isinstance(module, PackedLinear))
    write(linear.weight, torch.full(linear.weight.shape, 0.1))
    with pytest.raises(RuntimeError, match=r"query.weight was modified after acceleration.*restore"):
        output(model, IDS)
    output(restore(model), IDS)


def test_an_optimizer_steps_what_stays() -> None:
    model = bert()
    plain = copy.deepcopy(model)
    accelerated(model)
    output(model, IDS)
    for one in (model, plain):
        parameters = {path: p for path, p in one.named_parameters() if p.dim() == 1}
        for path, parameter in parameters.items():
            parameter.grad = torch.full_like(parameter, len(path) / 100)
        torch.optim.SGD(parameters.values(), lr=0.5).step()
    assert row_error(output(model, IDS), output(plain, IDS)) <= 1e-4


def test_nothing_watches_a_restored_model() -> None:
    model = bert()
    hooks = {path: dict(module._forward_pre_hooks) for path, module in model.named_modules()}
    restore(accelerated(model))
    assert {path: dict(module._forward_pre_hooks) for path, module in model.named_modules()} == hooks


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_large_kept_weights_of_their_own(copied: Callable[[nn.Module], nn.Module]) -> None:
    # Large ones are known by their memory and version, which are others in a copy.
    model = nn.Sequential(nn.Sequential(nn.Linear(300, 300), nn.LayerNorm(300), nn.LSTM(300, 256))).eval()
    accelerate_for_cpu(model, dtype="int8", originals="memory")
    rows = torch.randn(3, 300)
    with torch.no_grad():
        expected = model(rows)[0]
        other = copied(model)
        assert torch.equal(other(rows)[0], expected)
        other[0][2].weight_hh_l0.mul_(2)
        with pytest.raises(RuntimeError, match="weight_hh_l0 was modified"):
            other(rows)
        assert torch.equal(model(rows)[0], expected)
