"""Parameters of an accelerated model are those of the original: counted and read, and writes never fail silently."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import cache as once
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.core.packed_module import PackedModule
from tests.rewrite.decoder.decoder_families import DECODERS
from tests.rewrite.decoder.encoder_decoder_families import FAMILIES
from tests.rewrite.encoder_families import bert, vit
from tests.rewrite.recurrent import hybrids

_SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_SIZES)).eval()


def attention_of_torch() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), nn.Linear(64, 8)).eval()


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "bert": bert,
    "vit": vit,
    "mixtral": DECODERS["mixtral"].build,
    "t5": FAMILIES["t5"].build,
    "Lfm2": lambda: hybrids.build("Lfm2"),
    "torch": attention_of_torch,
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda p: p.mul_(1.05),
    "data in place": lambda p: p.data.mul_(1.05),
    "other data": lambda p: setattr(p, "data", p.detach() * 1.05),
    "copy": lambda p: p.copy_(p.detach() * 1.05),
    "an entry": lambda p: p.view(-1).__setitem__(0, 0.0),
    "initialization": nn.init.normal_,
    "detached": lambda p: p.detach().add_(1),
}


@once
def accelerated(name: str, dtype: str) -> Any:
    return accelerate_for_cpu(MODELS[name](), dtype=dtype)


def described(model: nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, p.shape, p.dtype) for name, p in model.named_parameters()]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_they_are_those_of_the_original(name: str, dtype: str) -> None:
    eager, model = MODELS[name](), accelerated(name, dtype)
    assert described(model) == described(eager)
    for (path, ours), (_, theirs) in zip(model.named_children(), eager.named_children(), strict=True):
        assert described(ours) == described(theirs), path
    if not hasattr(model, "num_parameters"):
        return
    for settings in ({}, {"exclude_embeddings": True}):
        assert model.num_parameters(**settings) == eager.num_parameters(**settings)
    assert (model.device, model.dtype) == (eager.device, eager.dtype)


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "bert", "mixtral", "t5"])
def test_the_footprint_is_that_of_what_is_there(name: str, dtype: str) -> None:
    eager, model = MODELS[name](), accelerated(name, dtype)
    plain = sum(
        p.nbytes for module in model.modules() for p in set(module._parameters.values()) if p is not None
    )
    shared = {
        id(p): p.nbytes for module in model.modules() for p in module._parameters.values() if p is not None
    }
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert sum(shared.values()) <= plain
    assert model.get_memory_footprint() == explain(model).packed_bytes + sum(shared.values()) + buffers
    assert model.get_memory_footprint(return_buffers=False) == model.get_memory_footprint() - buffers
    ratio = model.get_memory_footprint() / eager.get_memory_footprint()
    assert 0.95 <= ratio <= 1.3 if dtype == "float32" else ratio < 1
    assert model.base_model.get_memory_footprint() <= model.get_memory_footprint()


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("part", ["model", "base model", "layer", "linear"])
@torch.no_grad()
def test_a_loop_that_writes_to_all_raises(part: str, dtype: str, write: str) -> None:
    model = copy.deepcopy(accelerated("llama", dtype))
    inside = {
        "model": model,
        "base model": model.model,
        "layer": model.model.layers[0],
        "linear": model.lm_head,
    }[part]
    with pytest.raises(RuntimeError, match=r"hf_cpu_accel\.restore"):
        _write_to_all(inside, WRITES[write])


def _write_to_all(module: nn.Module, write: Callable[[Tensor], Any]) -> None:
    for parameter in module.parameters():
        write(parameter)


@torch.no_grad()
def test_values_are_read_and_not_kept() -> None:
    eager, model = llama(), accelerated("llama", "float32")
    for (name, ours), (_, theirs) in zip(model.named_parameters(), eager.named_parameters(), strict=True):
        assert torch.equal(ours + 0, theirs), name
        assert ours.norm() == theirs.norm()
    assert not any(module._values for module in model.modules() if isinstance(module, PackedModule))
    average = llama()
    for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
        mean.mul_(0.9).add_(parameter, alpha=0.1)


def test_loops_that_only_set_flags_go_on() -> None:
    model = copy.deepcopy(accelerated("llama", "float32"))
    model.requires_grad_(False)
    model.zero_grad()
    for parameter in model.parameters():
        parameter.requires_grad = False
    torch.optim.SGD(model.parameters(), lr=0.1)
    assert model.num_parameters(only_trainable=True) == 0


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(clone: Callable[[Any], Any]) -> None:
    twin = clone(accelerated("llama", "int8"))
    assert described(twin) == described(llama())
    assert twin.get_memory_footprint() == accelerated("llama", "int8").get_memory_footprint()


def test_torch_is_told_of_registered_parameters_alone() -> None:
    """Where it exchanges them: to export a graph."""
    model = accelerated("llama", "float32")
    places = dict(model.named_parameters(remove_duplicate=False))
    assert all(type(p) is nn.Parameter for p in places.values())
    assert set(places) < {name for name, _, _ in described(model)}


def test_restored_models() -> None:
    twin = copy.deepcopy(accelerated("llama", "int8"))
    restore(twin)
    assert twin.get_memory_footprint() == llama().get_memory_footprint()
    assert "named_parameters" not in vars(twin)
    assert all(type(p) is nn.Parameter for p in twin.parameters())


@torch.no_grad()
def test_parameters_that_stay_can_be_written_to() -> None:
    """By their names, as before: norms and biases are noticed by the next call."""
    eager, model = llama(), copy.deepcopy(accelerated("llama", "float32"))
    ids = torch.arange(8)[None]
    for changed in (eager, model):
        changed.model.norm.weight.mul_(1.5)
        dict(changed.named_parameters())["model.layers.1.input_layernorm.weight"].mul_(0.5)
    torch.testing.assert_close(model(ids).logits, eager(ids).logits, rtol=1e-3, atol=1e-3)
