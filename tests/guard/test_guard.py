"""Guards notice every change that a captured layer would not follow, and nothing that its calls do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel.guard.guard import Guard
from hf_cpu_accel.guard.stores import observe_stores

FACTOR = 2.0
OPTIONS = SimpleNamespace(factor=2.0)


def scaled(x: Tensor) -> Tensor:
    return x * FACTOR * OPTIONS.factor


class Config:
    """As those of transformers: some attributes have other names."""

    attribute_map: ClassVar[dict[str, str]] = {"width": "hidden_size"}

    def __init__(self) -> None:
        self.eps, self.hidden_size, self.unread = 0.5, 2, 1
        self.inner = SimpleNamespace(limit=3)

    def __getattr__(self, name: str) -> Any:
        if name not in Config.attribute_map:
            raise AttributeError(name)
        return getattr(self, Config.attribute_map[name])


class Part(nn.Module):
    residual: ClassVar[float] = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.activation: Callable[[Tensor], Tensor] = functional.gelu
        self.window = (7, 7)
        self.sizes = [2, 2]
        self.dtype = torch.float32
        self.scale = 0.5
        self.seen: Tensor | None = None
        self.by_size: dict[int, Tensor] = {}
        self.limit: float | None = None
        self.config = Config()
        self.register_buffer("table", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.last = self.by_size[len(x)] = x
        x = self.activation(self.linear(self.dropout(x))) + getattr(self, "offset", 0.0)
        return self.shifted(scaled(x)) * self.residual

    def shifted(self, x: Tensor) -> Tensor:
        return x + self.config.eps * self.config.width + self.config.inner.limit


def guarded(**options: Any) -> tuple[Any, Guard]:
    root = nn.Sequential(Part()).eval()
    return root, Guard(root, **options)


def append(part: Any) -> None:
    part.sizes.append(3)


def rename(part: Any) -> None:
    part.config.hidden_size = 3


def other_forward(part: Any) -> None:
    part.linear.forward = lambda x: -x


def other_method(part: Any) -> None:
    part.shifted = MethodType(lambda self, x: x - 1, part)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "function": lambda part: setattr(part, "activation", torch.tanh),
    "tuple": lambda part: setattr(part, "window", (7, 8)),
    "list": append,
    "dtype": lambda part: setattr(part, "dtype", torch.bfloat16),
    "number": lambda part: setattr(part, "scale", 0.25),
    "tensor for a number": lambda part: setattr(part, "scale", torch.ones(2)),
    "removed": lambda part: delattr(part, "scale"),
    "none before": lambda part: setattr(part, "limit", 1.0),
    "new": lambda part: setattr(part, "offset", 1.0),
    "number of the class": lambda part: setattr(part, "residual", 2.0),
    "method": other_method,
    "config": lambda part: setattr(part, "config", Config()),
    "value of a config": lambda part: setattr(part.config, "eps", 1.0),
    "renamed value of a config": rename,
    "config in a config": lambda part: setattr(part.config.inner, "limit", 4),
    "parameter": lambda part: setattr(part.linear, "bias", nn.Parameter(torch.ones(2))),
    "buffer": lambda part: setattr(part, "table", torch.ones(2)),
    "mode": lambda part: part.dropout.train(),
    "module": lambda part: setattr(part, "linear", nn.Linear(2, 2)),
    "forward": other_forward,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_of_modules_and_configs_are_noticed(change: Callable[[Any], Any]) -> None:
    root, guard = guarded()
    assert not guard.has_changed()
    change(root[0])
    assert guard.has_changed()


def test_a_class_whose_forward_is_replaced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    root, guard = guarded()
    _, structure = guarded(attributes=False)
    forward = Part.forward
    monkeypatch.setattr(Part, "forward", lambda self, x: -x)
    assert guard.has_changed()
    assert structure.has_changed()
    copied = copy.deepcopy([root, guard])[1]
    assert copied.has_changed()
    monkeypatch.setattr(Part, "forward", forward)
    assert not guard.has_changed()


def test_removed_hooks_that_leave_the_forward_of_the_class_do_not_count() -> None:
    root, guard = guarded()
    root[0].linear.forward = root[0].linear.forward
    assert not guard.has_changed()
    root[0].linear.forward = lambda x: -x
    assert guard.has_changed()
    del root[0].linear.forward
    assert not guard.has_changed()


def test_hooks_of_all_modules_are_noticed() -> None:
    _, guard = guarded()
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert guard.has_changed()
    finally:
        handle.remove()
    assert not guard.has_changed()


@pytest.mark.parametrize("recorded", [False, True])
def test_equal_values_and_what_calls_store_are_no_change(recorded: bool) -> None:
    root = nn.Sequential(Part()).eval()
    with observe_stores(root.modules()):
        root(torch.ones(1, 2))
    del root[0].last
    root[0].seen, root[0].by_size = None, {}
    guard = Guard(root, recorded=recorded)
    part: Any = root[0]
    part.window, part.sizes = (7, 3 + 4), [2, 2]
    part.unread, part.config.unread, part.config.new = 3, 2, 3
    root(torch.ones(3, 2))
    assert not guard.has_changed()


def test_followed_attributes_and_structure_alone() -> None:
    root, structure = guarded(attributes=False)
    root[0].scale, root[0].config.eps = 3.0, 3.0
    assert not structure.has_changed()
    part = Part().eval()
    guard = Guard(part, followed=("scale",))
    part.scale = 3.0
    assert not guard.has_changed()
    part.window = (1, 1)
    assert guard.has_changed()


def a_global() -> None:
    globals()["FACTOR"] = 3.0


def a_function() -> None:
    globals()["scaled"] = lambda x: x


def an_object() -> None:
    OPTIONS.factor = 3.0


def of_the_class() -> None:
    Part.residual = 3.0


@pytest.mark.parametrize("change", [a_global, a_function, an_object, of_the_class])
def test_globals_and_classes_count_for_recorded_layers(
    change: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FACTOR", "scaled"):
        monkeypatch.setitem(globals(), name, globals()[name])
    monkeypatch.setattr(OPTIONS, "factor", OPTIONS.factor)
    monkeypatch.setattr(Part, "residual", Part.residual)
    _, guard = guarded(structure=False, recorded=True)
    assert not guard.has_changed()
    change()
    assert guard.has_changed()


def test_classes_and_modes_of_modules_count_for_recorded_layers() -> None:
    root, guard = guarded(structure=False, recorded=True)
    root[0].__class__ = type("Other", (Part,), {})
    assert guard.has_changed()
    root[0].__class__ = Part
    root[0].register_parameter("offset", nn.Parameter(torch.ones(2)))
    assert guard.has_changed()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda root: pickle.loads(pickle.dumps(root))])
def test_a_copy_compares_its_own_modules(copied: Callable[[Any], Any]) -> None:
    root, _ = guarded()
    root.guard = Guard(root)
    for change in (CHANGES["function"], CHANGES["value of a config"], CHANGES["module"], CHANGES["forward"]):
        other = copied(root)
        assert not other.guard.has_changed()
        change(other[0])
        assert other.guard.has_changed()
        assert not root.guard.has_changed()
