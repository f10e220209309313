"""Hooks that a user registers after acceleration are called on every module of the original tree, with its values."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from hf_cpu_accel import restore
from hf_cpu_accel.check import row_error
from tests.rewrite.decoder.decoder_families import DECODERS
from tests.rewrite.decoder.llama_stack import accelerated
from tests.rewrite.encoder_families import bert, distilbert, mpnet, t5, vit

IDS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "bert": (bert, IDS),
    "distilbert": (distilbert, IDS),
    "mpnet": (mpnet, IDS),
    "t5": (t5, IDS),
    "vit": (vit, PIXELS),
    **{name: (DECODERS[name].build, IDS) for name in ("llama", "gpt2", "phi", "mixtral") if name in DECODERS},
}


def first_tensor(value: object) -> Tensor | None:
    if isinstance(value, tuple | list):
        return next((tensor for part in value if (tensor := first_tensor(part)) is not None), None)
    return value + 0 if isinstance(value, Tensor) else None


def watched(model: nn.Module, modules: dict[str, nn.Module], call: Tensor) -> dict[str, list[Tensor | None]]:
    """{path: outputs} of a forward whose modules all have hooks."""
    seen: dict[str, list[Tensor | None]] = {}
    handles = [
        module.register_forward_hook(
            lambda module, args, output, path=path: seen.setdefault(path, []).append(first_tensor(output))
        )
        for path, module in modules.items()
    ]
    with torch.no_grad():
        model(call)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("held", ["model's", "user's"])
@pytest.mark.parametrize("name", MODELS)
def test_hooks_on_all_modules_are_called(name: str, held: str) -> None:
    """Those of the model as it is now, and those that a user has held on to since before."""
    build, call = MODELS[name]
    model = build()
    before = dict(model.named_modules())
    expected = watched(model, before, call)
    accelerated(model)
    with torch.no_grad():
        plain = first_tensor(list(model(call).values()))
    modules = {path: model.get_submodule(path) for path in before} if held == "model's" else before
    got = watched(model, modules, call)
    assert got.keys() == expected.keys()
    for path, outputs in expected.items():
        assert len(outputs) == len(got[path]), path
        for ours, theirs in zip(got[path], outputs, strict=True):
            if theirs is not None and theirs.is_floating_point():
                assert row_error(ours, theirs) <= 1e-4, path
    with torch.no_grad():
        assert row_error(first_tensor(list(model(call).values())), plain) == 0  # fused again


@pytest.mark.parametrize("name", MODELS)
def test_a_hook_on_any_one_module_changes_what_it_changes_in_the_original(name: str) -> None:
    build, call = MODELS[name]
    model = build()
    plain = copy.deepcopy(model)
    accelerated(model)

    def halve(module: nn.Module, args: object, output: object) -> object:
        if isinstance(output, Tensor) and output.is_floating_point():
            return output * 0.5
        return None

    for path, module in plain.named_modules():
        handles = [owner.register_forward_hook(halve) for owner in (module, model.get_submodule(path))]
        with torch.no_grad():
            theirs, ours = (first_tensor(list(one(call).values())) for one in (plain, model))
        assert row_error(ours, theirs) <= 1e-4, path
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("name", MODELS)
def test_hooks_on_all_modules_that_there_are(name: str) -> None:
    """As counters of operations and profilers register them."""
    build, call = MODELS[name]
    model = build()
    plain = copy.deepcopy(model)
    accelerated(model)
    for one in (model, plain):
        with torch.no_grad():
            one(call)
    counted = []
    for one in (model, plain):
        seen: list[nn.Module] = []
        handle = register_module_forward_hook(lambda module, *_, seen=seen: seen.append(module))
        with torch.no_grad():
            one(call)
        handle.remove()
        paths = {id(module): path for path, module in one.named_modules()}
        counted.append(sorted(paths[id(module)] for module in seen))
    assert counted[0] == counted[1]


def test_hooks_stay_with_the_modules_of_the_original_after_restore() -> None:
    model, seen = bert(), []
    held = model.encoder.layer[1].output.dense
    accelerated(model)
    held.register_forward_hook(lambda *_: seen.append("held"))
    model.encoder.layer[0].output.dense.register_forward_hook(lambda *_: seen.append("replaced"))
    restore(model)
    with torch.no_grad():
        model(IDS)
    assert seen == ["replaced", "held"]
