"""A fused part that is slower than its own forward is found in calls of the model, unfused for that size, and reported."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetModel, SwinConfig, SwinModel

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.patching.fused_module import FusedModuleMixin
from hf_cpu_accel.providers import choice
from hf_cpu_accel.providers.autotune import autotune
from hf_cpu_accel.providers.budget import Budget
from hf_cpu_accel.providers.choice import Chooser
from hf_cpu_accel.providers.store import Store
from hf_cpu_accel.providers.switch import VARIABLE
from hf_cpu_accel.rewrite.convolution import residual_block
from hf_cpu_accel.rewrite.core.autotune import Autotune
from hf_cpu_accel.rewrite.decoder import deferred
from hf_cpu_accel.rewrite.encoder import layer as encoder_layer
from hf_cpu_accel.rewrite.encoder import window_layer
from tests.rewrite.convolution.convolution_blocks import with_statistics
from tests.rewrite.decoder.decoder_families import DECODERS
from tests.rewrite.encoder_families import bert

IDS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def swin() -> nn.Module:
    config = SwinConfig(image_size=32, patch_size=4, embed_dim=32, depths=[2], num_heads=[2], window_size=4)
    return SwinModel(config, add_pooling_layer=False).eval()


def resnet() -> nn.Module:
    config = ResNetConfig(embedding_size=32, hidden_sizes=[32], depths=[2], layer_type="basic")
    return with_statistics(ResNetModel(config)).eval()


# model, input, where the name of the kernel is, the name
PARTS: dict[str, tuple[Callable[[], nn.Module], Tensor, Any, str]] = {
    "encoder layer": (bert, IDS, encoder_layer, "bound_encoder_layer"),
    "decoder layer": (DECODERS["llama"].build, IDS, deferred, "_DECODER_LAYERS"),
    "window layer": (swin, PIXELS, window_layer, "bound_encoder_layer"),
    "convolutions": (resnet, PIXELS, residual_block, "convolutions"),
}


class Clock:
    """Advances a little whenever it is read, and by `slow` in a planted kernel."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    def slow(self, kernel: Any) -> Callable[..., Any]:
        def planted(*args: Any, **kwargs: Any) -> Any:
            self.now += 1e-3
            return kernel(*args, **kwargs)

        return planted


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    """Measurements are on, by a clock of the test's own."""
    clock = Clock()
    monkeypatch.setenv(VARIABLE, "auto")
    made = Chooser(
        lambda threads: Store(tmp_path, {"threads": threads}),
        autotune=partial(autotune, clock=clock),
        find_candidates=lambda dtype: (),
        budget=Budget(lambda: 0.0),
        clock=lambda: 0.0,
        is_busy=lambda: False,
    )
    monkeypatch.setattr(choice, "chooser", lambda: made)
    return clock


def run(model: nn.Module, input: Tensor, times: int = 1) -> Tensor:
    with torch.no_grad():
        for _ in range(times):
            output = model(input, **({"use_cache": False} if hasattr(model, "lm_head") else {}))
    return output[0] + 0


def unfused_sizes(model: nn.Module) -> list[set[Any]]:
    return [vars(m)["_unfused_sizes"] for m in model.modules() if "_unfused_sizes" in vars(m)]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("part", PARTS)
def test_a_planted_slow_kernel_is_found_and_left(
    part: str, dtype: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, input, module, name = PARTS[part]
    model = build()
    expected = run(model, input)
    accelerate_for_cpu(model, dtype=dtype)
    fused = run(model, input)
    monkeypatch.setattr(module, name, clock.slow(getattr(module, name)))
    run(model, input, times=4)
    before = clock.now
    answer = run(model, input)
    assert clock.now - before < 1e-3  # not one of the planted calls
    assert (answer - fused).norm() <= (1e-4 if dtype == "float32" else 5e-2) * fused.norm()
    assert any("unfused: up to" in item.provider for item in explain(model).items)
    assert "unfused" in str(explain(model))
    assert torch.equal(run(restore(model), input), expected)


@pytest.mark.parametrize("part", PARTS)
def test_a_fast_kernel_stays(part: str, clock: Clock) -> None:
    build, input, *_ = PARTS[part]
    model = accelerate_for_cpu(build(), dtype="float32")
    run(model, input, times=4)
    assert unfused_sizes(model) == []
    assert not any("unfused" in item.provider for item in explain(model).items)


def test_only_calls_of_that_size_are_left(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    model = accelerate_for_cpu(bert(), dtype="float32")
    fast = encoder_layer.bound_encoder_layer
    monkeypatch.setattr(encoder_layer, "bound_encoder_layer", clock.slow(fast))
    run(model, IDS, times=3)
    monkeypatch.setattr(encoder_layer, "bound_encoder_layer", fast)
    calls: list[int] = []

    def counted(*args: Any) -> Tensor:
        calls.append(1)
        return fast(*args)

    run(model, IDS[:1, :2], times=3)
    monkeypatch.setattr(encoder_layer, "bound_encoder_layer", counted)
    run(model, IDS)
    assert not calls
    run(model, IDS[:, :8])  # of two texts up to 8 tokens, which were not measured yet
    run(model, IDS[:1, :2])
    assert len(calls) == 2 * len(model.encoder.layer)


def test_the_first_call_of_a_size_measures_nothing(clock: Clock) -> None:
    model = accelerate_for_cpu(bert(), dtype="float32")
    run(model, IDS)
    assert clock.now == 0
    run(model, IDS)
    assert clock.now > 0


def test_nothing_is_measured_for_ever(clock: Clock) -> None:
    model = accelerate_for_cpu(bert(), dtype="float32")
    run(model, IDS, times=12)
    before = clock.now
    run(model, IDS, times=3)
    assert clock.now == before
    hooks = [hook for m in model.modules() for hook in m._forward_pre_hooks.values()]
    assert [type(hook).__name__ for hook in hooks].count("_Measurement") == 0


def test_a_spent_budget_is_waited_for(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    model = accelerate_for_cpu(bert(), dtype="float32")
    monkeypatch.setattr(Chooser, "can_measure", lambda self: False)
    run(model, IDS, times=20)
    assert clock.now == 0
    monkeypatch.undo()


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(
    clone: Callable[[nn.Module], nn.Module], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = accelerate_for_cpu(bert(), dtype="float32")
    monkeypatch.setattr(encoder_layer, "bound_encoder_layer", clock.slow(encoder_layer.bound_encoder_layer))
    answer = run(model, IDS, times=4)
    twin = clone(model)
    torch.testing.assert_close(run(twin, IDS, times=3), answer, rtol=1e-4, atol=1e-4)
    assert all(isinstance(part, FusedModuleMixin) for part in twin.encoder.layer)


@pytest.mark.parametrize("asked", ["auto", "own"])
def test_who_wants_our_kernels_alone_gets_them(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, asked)
    model = accelerate_for_cpu(bert(), dtype="float32", providers="own")
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    assert not any(isinstance(hook, Autotune) for hook in hooks)
