"""Modules, forwards and attributes that a user replaces inside of fused layers, as adapters do, take effect."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel.check import row_error
from hf_cpu_accel.patching.fused_module import FusedModuleMixin
from hf_cpu_accel.rewrite.norm.match import FusedNorm
from tests.patching.test_hooks_after_acceleration import IDS, MODELS, first_tensor
from tests.rewrite.cached import cached_models
from tests.rewrite.decoder.llama_stack import accelerated
from tests.rewrite.latent import latent_models

ALL: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    **MODELS,
    "apertus": (lambda: cached_models.build("Apertus"), IDS % 60),
    "moshi": (lambda: cached_models.build("Moshi"), IDS % 60),
    "deepseek-v3": (lambda: latent_models.build("DeepseekV3"), IDS),
    "minicpm3": (lambda: latent_models.build("MiniCPM3"), IDS),
}
NAMES = pytest.mark.parametrize("name", ALL)


class Halved(nn.Module):
    """As an adapter around a module: no weights of its own to speak of."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the wrapped module, which hosts read."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return halved(self.base(*args, **kwargs))


def halved(output: Any) -> Any:
    return output * 0.5 if isinstance(output, Tensor) and output.is_floating_point() else output


def wrapped(model: nn.Module, path: str) -> Callable[[], None]:
    """Wrap a module; the returned function undoes it."""
    above, _, name = path.rpartition(".")
    parent, base = model.get_submodule(above), model.get_submodule(path)
    parent._modules[name] = Halved(base)

    def undo() -> None:
        parent._modules[name] = base

    return undo


def with_a_forward(model: nn.Module, path: str) -> Callable[[], None]:
    module = model.get_submodule(path)
    own = module.forward
    module.forward = lambda *args, **kwargs: halved(own(*args, **kwargs))

    def undo() -> None:
        del module.forward

    return undo


def output_of(model: nn.Module, call: Tensor) -> Tensor:
    with torch.no_grad():
        found = first_tensor(list(model(call).values()))
    assert found is not None
    return found


def inside(model: nn.Module) -> list[str]:
    """Return the paths of modules inside of fused ones."""
    fused = [path for path, module in model.named_modules() if isinstance(module, FusedModuleMixin)]
    paths = [path for path, module in model.named_modules() if not isinstance(module, nn.ModuleList)]
    return [path for path in paths if any(path.startswith(f"{other}.") for other in fused)]


@pytest.mark.parametrize("change", [wrapped, with_a_forward], ids=lambda change: change.__name__)
@NAMES
def test_any_one_module_that_is_exchanged(name: str, change: Any) -> None:
    build, call = ALL[name]
    model = build()
    eager = copy.deepcopy(model)
    accelerated(model)
    before = output_of(model, call)
    changed = 0
    for path in inside(model):
        try:
            undo_eager = change(eager, path)
        except AttributeError:
            continue  # an activation that only we have
        undo = change(model, path)
        theirs, ours = output_of(eager, call), output_of(model, call)
        assert row_error(ours, theirs) <= 1e-4, path
        changed += row_error(theirs, before) > 1e-3
        undo(), undo_eager()
    assert changed >= 3
    assert row_error(output_of(model, call), before) == 0  # fused again


@NAMES
def test_calls_change_nothing(name: str) -> None:
    build, call = ALL[name]
    model = build()
    accelerated(model)
    for _ in range(2):
        output_of(model, call)
    if call is IDS and hasattr(model, "lm_head"):
        model.generate(call, max_new_tokens=3, do_sample=False)
    fused = [module for module in model.modules() if isinstance(module, FusedModuleMixin)]
    assert fused
    assert not any(module.is_edited for module in fused)


@NAMES
def test_attributes_that_are_changed(name: str) -> None:
    build, call = ALL[name]
    model = build()
    eager = copy.deepcopy(model)
    accelerated(model)
    output_of(model, call)
    changed = 0
    for path, module in eager.named_modules():
        for attribute in ("scaling", "scale", "eps", "variance_epsilon", "is_causal", "residual_multiplier"):
            value = vars(module).get(attribute)
            if not isinstance(value, float | bool):
                continue
            before = output_of(eager, call)
            other = not value if isinstance(value, bool) else 3 * value + 0.5
            if isinstance(model.get_submodule(path), FusedNorm):
                with pytest.raises(RuntimeError, match="restore"):
                    setattr(model.get_submodule(path), attribute, other)
                assert getattr(model.get_submodule(path), attribute) == value
                continue
            for one in (module, model.get_submodule(path)):
                setattr(one, attribute, other)
            theirs, ours = output_of(eager, call), output_of(model, call)
            assert row_error(ours, theirs) <= 1e-4, f"{path}.{attribute}"
            changed += row_error(theirs, before) > 1e-3
            for one in (module, model.get_submodule(path)):
                setattr(one, attribute, value)
    assert changed or name in ("mpnet", "distilbert", "t5")


@pytest.mark.parametrize("name", ["llama", "apertus", "deepseek-v3"])
def test_tokens_of_a_model_with_an_adapter(name: str) -> None:
    model = ALL[name][0]()
    eager = copy.deepcopy(model)
    accelerated(model)
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    ids = ALL[name][1]
    plain = model.generate(ids, **settings)
    for beams in (1, 2):
        undo = [wrapped(one, "model.layers.1.self_attn.o_proj") for one in (model, eager)]
        ours, theirs = (one.generate(ids, num_beams=beams, **settings) for one in (model, eager))
        assert torch.equal(ours, theirs)
        for one in undo:
            one()
    assert torch.equal(model.generate(ids, **settings), plain)


VALUES = {
    "bert": "encoder.layer.1.attention.self.value",
    "llama": "model.layers.1.self_attn.v_proj",
    "apertus": "model.layers.1.self_attn.v_proj",
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_notice_it_too(name: str, copied: Any) -> None:
    build, call = ALL[name]
    model = build()
    eager = copy.deepcopy(model)
    accelerated(model)
    path = VALUES[name]
    for change in (wrapped, with_a_forward):
        made, other = copied(model), copy.deepcopy(eager)
        assert row_error(output_of(made, call), output_of(eager, call)) <= 1e-4
        change(made, path), change(other, path)
        theirs = output_of(other, call)
        assert row_error(output_of(made, call), theirs) <= 1e-4
        assert row_error(output_of(model, call), theirs) > 1e-4
