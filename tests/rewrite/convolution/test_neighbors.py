"""Blocks in one list run in one call, and readers between them get the values of eager."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MobileNetV1Config, MobileNetV1Model

from hf_cpu_accel import accelerate_for_cpu, restore
from hf_cpu_accel.rewrite.convolution.deferred_images import DeferredImages
from hf_cpu_accel.rewrite.convolution.residual_block import FusedResidualBlock
from tests.rewrite.convolution.convolution_blocks import with_statistics

WITHIN = {"float32": 1e-4, "bfloat16": 3e-2, "int8": 6e-2}


def mobile() -> nn.Module:
    torch.manual_seed(0)
    config = MobileNetV1Config(depth_multiplier=0.5, num_channels=3)
    return with_statistics(MobileNetV1Model(config)).requires_grad_(False)


def pixels(batch: int = 1, height: int = 65, width: int = 48) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(batch))


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def blocks(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FusedResidualBlock)]


@pytest.mark.parametrize("dtype", WITHIN)
def test_single_convolutions_of_a_list_are_one_call(dtype: str, threads: int) -> None:
    model = mobile()
    images = [pixels(), pixels(2, 33, 64), pixels(3).contiguous(memory_format=torch.channels_last)]
    expected = [model(image).last_hidden_state for image in images]
    accelerate_for_cpu(model, dtype=dtype)
    assert len(blocks(model)) == 27
    for image, theirs in zip(images, expected, strict=True):
        assert distance(model(image).last_hidden_state, theirs) < WITHIN[dtype]
    assert len(model.layer[-1]._joined[0]) == 27
    restore(model)
    for image, theirs in zip(images, expected, strict=True):
        assert torch.equal(model(image).last_hidden_state, theirs)


@pytest.mark.parametrize("dtype", WITHIN)
def test_hidden_states_are_there_and_change_nothing(dtype: str) -> None:
    model = mobile()
    expected = model(pixels(), output_hidden_states=True)
    accelerate_for_cpu(model, dtype=dtype)
    alone = model(pixels()).last_hidden_state
    got = model(pixels(), output_hidden_states=True)
    assert torch.equal(got.last_hidden_state, alone)
    for ours, theirs in zip(reversed(got.hidden_states), reversed(expected.hidden_states), strict=True):
        assert distance(ours, theirs) < WITHIN[dtype]


def test_no_block_runs_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model, image = accelerate_for_cpu(mobile(), dtype="float32"), pixels()
    ran: list[int] = []
    run = DeferredImages._make.__globals__["_run"]

    def counted(image: Tensor, blocks: Any) -> Tensor:
        ran.append(len(blocks))
        return run(image, blocks)

    monkeypatch.setitem(DeferredImages._make.__globals__, "_run", counted)
    states, image = [], model.conv_stem(image)
    for layer in model.layer:
        image = layer(image)
        states.append(image)
    for state in reversed(states):
        state.sum()
    assert sum(ran) == 27


def test_edits_hooks_and_modes_count() -> None:
    model, image = mobile(), pixels()
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    model(image)
    seen: list[Tensor] = []
    hook = model.layer[4].convolution.register_forward_hook(lambda module, args, output: seen.append(output))
    assert distance(model(image).last_hidden_state, eager(image).last_hidden_state) < 1e-4
    assert len(seen) == 1
    hook.remove()
    hook = model.layer[6].register_forward_hook(lambda module, args, output: output * 2)
    other = eager.layer[6].register_forward_hook(lambda module, args, output: output * 2)
    assert distance(model(image).last_hidden_state, eager(image).last_hidden_state) < 1e-4
    hook.remove()
    other.remove()
    for changed in (model, eager):
        changed.layer[8].activation = nn.Identity()
    assert distance(model(image).last_hidden_state, eager(image).last_hidden_state) < 1e-4
    model.layer[3].normalization.bias.add_(1.0)
    with pytest.raises(RuntimeError, match="modified after acceleration"):
        model(image)


def test_what_is_written_to_between_two_blocks() -> None:
    model, image = mobile(), pixels()
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    outputs = []
    for network in (eager, model):
        first = network.layer[0](network.conv_stem(image))
        second = network.layer[1](first)
        first.zero_()
        outputs.append((first, second, network.layer[1](first)))
    for theirs, ours in zip(*outputs, strict=True):
        torch.testing.assert_close(ours + 0, theirs, atol=1e-5, rtol=1e-5)


def test_copies_and_pickles() -> None:
    model, image = accelerate_for_cpu(mobile(), dtype="float32"), pixels()
    expected = model(image).last_hidden_state + 0
    assert torch.equal(copy.deepcopy(model)(image).last_hidden_state, expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(image).last_hidden_state, expected)


def test_linears_alone_are_left_to_whoever_is_fastest() -> None:
    layers = nn.ModuleList(nn.Sequential(nn.Conv2d(32, 32, 1), nn.ReLU()) for _ in range(3))
    model = accelerate_for_cpu(nn.ModuleDict({"layers": layers}).eval(), dtype="float32")
    assert not blocks(model)
