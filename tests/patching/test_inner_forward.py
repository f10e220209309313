"""Hooks of diffusers come and go around attention in any order with accelerating and restoring."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, restore
from hf_cpu_accel.guard.modules import instance_forward
from hf_cpu_accel.rewrite.attention import processor


class Shifted(ModelHook):
    """Changes what passes, and calls the forward of the module through the chain."""

    def pre_forward(self, module: nn.Module, *args: Tensor, **kwargs: Tensor) -> tuple[object, object]:
        return (args[0] + 1, *args[1:]), kwargs


class Twice(ModelHook):
    """Calls the forward itself, as caches do."""

    def new_forward(self, module: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return 2 * self.fn_ref.original_forward(*args, **kwargs)


HOOKS = {"shifted": Shifted, "twice": Twice}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention(query_dim=32, heads=2, dim_head=16)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.attn(hidden_states)


def change(block: Block, name: str) -> bool:
    """Add the hook, or remove it if it is there.

    Returns:
        Whether a hook was removed from below another: diffusers then has the other call a forward that it no longer should,
            now or when
        that one is removed, too.
    """
    registry = HookRegistry.check_if_exists_or_initialize(block.attn)
    if registry.get_hook(name) is None:
        registry.register_hook(HOOKS[name](), name)
        return False
    beneath = name != list(registry.hooks)[-1]
    registry.remove_hook(name)
    return beneath


@pytest.mark.parametrize("seed", range(16))
def test_whatever_the_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    original = processor.attention

    def counted(*args: object, **options: object) -> Tensor:
        calls.append(None)
        return original(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(processor, "attention", counted)
    block = Block().eval().requires_grad_(False)
    twin, input = copy.deepcopy(block), torch.randn(2, 5, 32)
    accelerated = torn = False
    choose = random.Random(seed)
    for _ in range(14):
        step = choose.choice(["shifted", "twice", "accelerate"])
        if step == "accelerate":
            (restore if accelerated else _accelerate)(block)
            accelerated = not accelerated
        else:
            torn |= change(block, step)
            change(twin, step)
        calls.clear()
        given, expected = block(input), twin(input)
        assert torn or len(calls) == accelerated
        torch.testing.assert_close(given, expected, **({} if accelerated else {"atol": 0, "rtol": 0}))


def _accelerate(block: Block) -> None:
    accelerate_for_cpu(block, dtype="float32", threads=torch.get_num_threads())


def test_what_hooks_leave_behind_is_the_forward_of_the_class() -> None:
    block = Block().eval()
    for _ in range(2):
        change(block, "twice")
    assert "forward" in vars(block.attn)
    assert instance_forward(block.attn) is None
    block.attn.forward = Block().attn.forward  # of another module
    assert instance_forward(block.attn) is not None


def test_copies_of_hooked_modules_are_copied_with_their_own_forward() -> None:
    block, input = Block().eval(), torch.randn(2, 5, 32)
    _accelerate(block)
    change(block, "twice")
    change(block, "twice")
    other = copy.deepcopy(block)
    restore(block)
    with torch.no_grad():
        torch.testing.assert_close(other(input), block(input))
