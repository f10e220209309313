"""Any number of any module may change after acceleration: outputs equal those of eager, or an error names the remedy."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.check import row_error
from hf_cpu_accel.patching.fused_module import FusedModuleMixin
from hf_cpu_accel.rewrite.convolution.residual_block import FusedResidualBlock
from tests.patching.test_hooks_after_acceleration import MODELS, first_tensor
from tests.rewrite.decoder.llama_stack import accelerated

IMAGE = torch.randn(2, 3, 19, 18, generator=torch.Generator().manual_seed(0))
CHANNELS = 32


class Forking(nn.Module):
    """A block whose forward depends on the attributes that exist."""

    adds: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS)
        self.second = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self._activates = True
        self.skips: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        y = torch.relu(y) if self._activates else y
        y = y if self.skips or getattr(self, "halts", False) else self.second(y)
        return self.summed(x, y) if self.adds else y

    def summed(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def forking() -> nn.Module:
    stem = nn.Conv2d(3, CHANNELS, 3, 2, 1), nn.BatchNorm2d(CHANNELS), nn.ReLU()
    model = nn.Sequential(
        *stem, Forking(), nn.Conv2d(CHANNELS, 48, 1), nn.BatchNorm2d(48), nn.MaxPool2d(2, 2)
    )
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval()


ALL: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {**MODELS, "convolutions": (forking, IMAGE)}
# What eager itself does not take back, and which entry of a cache a layer writes to.
_LEFT = ("max_norm", "layer_idx", "training")


def output_of(model: nn.Module, call: Tensor) -> Tensor:
    with torch.no_grad():
        output = model(call)
    found = output + 0 if isinstance(output, Tensor) else first_tensor(list(output.values()))
    assert found is not None
    return found.movedim(1, -1) if found.dim() == 4 else found


def others(value: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, max(value - 1, 0))
    elif isinstance(value, float):
        yield 2 * value + 0.5
    elif isinstance(value, tuple) and value and all(type(part) is int for part in value):
        yield tuple(part + 1 for part in value)


def changes(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """(path, attribute, another value) of all numbers of all modules."""
    for path, module in model.named_modules():
        for name, value in list(vars(module).items()):
            if name not in _LEFT and not name.startswith("_"):
                yield from ((path, name, other) for other in others(value))


@pytest.mark.parametrize("name", ALL)
def test_any_number_of_any_module(name: str) -> None:
    build, call = ALL[name]
    eager = build()
    model = copy.deepcopy(eager)
    accelerated(model)
    before, counted = output_of(eager, call), 0
    assert row_error(output_of(model, call), before) <= 1e-4
    for path, attribute, other in changes(eager):
        one, two = eager.get_submodule(path), model.get_submodule(path)
        value = getattr(one, attribute)
        if not hasattr(two, attribute):
            continue
        setattr(one, attribute, other)
        try:
            theirs = output_of(eager, call)
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, AssertionError):
            theirs = None
        setattr(one, attribute, value)
        if theirs is None or row_error(theirs, before) < 1e-4:
            continue
        counted += 1
        kept = getattr(two, attribute)
        try:
            setattr(two, attribute, other)
        except RuntimeError as error:
            refused = str(error)
        else:
            refused = ""
        if refused:
            assert "restore" in refused
            assert getattr(two, attribute) == kept
            continue
        assert row_error(output_of(model, call), theirs) <= 1e-4, f"{path}.{attribute} = {other}"
        setattr(two, attribute, kept)
    assert counted >= 2
    assert row_error(output_of(model, call), before) <= 1e-4


def not_activating(block: Any) -> None:
    block._activates = False


def not_adding(block: Any) -> None:
    block.adds = False  # beside the class's


def skipping(block: Any) -> None:
    block.skips = True  # was None


def halting(block: Any) -> None:
    block.halts = True  # was not there


def subtracting(block: Any) -> None:
    block.summed = MethodType(lambda self, x, y: x - y, block)


CHANGES = (not_activating, not_adding, skipping, halting, subtracting)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize(
    "copied", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_attributes_of_all_kinds(change: Any, copied: Any) -> None:
    eager = forking()
    model = copied(accelerate_for_cpu(copy.deepcopy(eager), dtype="float32"))
    assert isinstance(model[3], FusedResidualBlock)
    assert not model[3].is_edited
    for one in (eager, model):
        change(one[3])
    assert row_error(output_of(model, IMAGE), output_of(eager, IMAGE)) <= 1e-4


def test_what_forwards_keep_does_not_count() -> None:
    class Keeping(Forking):
        def forward(self, x: Tensor) -> Tensor:
            self.skips = None
            self.last_shape = x.shape
            return super().forward(x)

    model = nn.Sequential(nn.Conv2d(3, CHANNELS, 3), Keeping()).eval()
    accelerate_for_cpu(model, dtype="float32")
    block: Any = model[1]
    block.last_shape, block.a_note_of_the_user = IMAGE.shape, "looked at"
    output_of(model, IMAGE)
    assert not any(module.is_edited for module in model.modules() if isinstance(module, FusedModuleMixin))


def test_names_that_a_fused_class_would_hide_are_refused() -> None:
    """The own forward, which runs while hooks watch, must find its attributes: here a method that the fused class also has."""

    class Joining(Forking):
        def forward(self, x: Tensor) -> Tensor:
            return self.joined(x, self.second(self.norm(self.first(x))))

        def joined(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    eager = nn.Sequential(nn.Conv2d(3, CHANNELS, 3), Joining()).eval()
    model = accelerate_for_cpu(copy.deepcopy(eager), dtype="float32")
    assert not isinstance(model[1], FusedModuleMixin)
    assert "it defines 'joined'" in str(explain(model))
    assert row_error(output_of(model, IMAGE), output_of(eager, IMAGE)) <= 1e-4


def test_a_forward_that_leaves_something_for_others_is_not_fused() -> None:
    class Leaving(Forking):
        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.first(x))
            self.seen = y
            return x + self.second(torch.relu(y))

        def last(self) -> Tensor:
            return self.seen

    class Reading(Leaving):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.norm(self.first(x))
            return x + self.second(torch.relu(self.last()))

    eager = nn.Sequential(nn.Conv2d(3, CHANNELS, 3), Leaving()).eval()
    model = accelerate_for_cpu(copy.deepcopy(eager), dtype="float32")
    assert "its forward stores 'seen' for other code to read" in str(explain(model))
    for _ in range(2):
        image = torch.randn(1, 3, 9, 9)
        assert row_error(output_of(model, image), output_of(eager, image)) <= 1e-4
        ours, theirs = (one[1].seen.movedim(1, -1) for one in (model, eager))
        assert row_error(ours, theirs) <= 1e-4
    own = accelerate_for_cpu(nn.Sequential(nn.Conv2d(3, CHANNELS, 3), Reading()).eval(), dtype="float32")
    assert isinstance(own[1], FusedResidualBlock)  # what only it reads is its own


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_how_a_convolution_moves_is_refused_in_words_and_restored(dtype: str) -> None:
    eager = forking()
    model = accelerate_for_cpu(copy.deepcopy(eager), dtype=dtype)
    for path, name, other in (("0", "stride", (1, 1)), ("4", "padding_mode", "circular"), ("5", "eps", 0.5)):
        with pytest.raises(RuntimeError, match=f"{name}=.* cannot be set.*restore"):
            setattr(model.get_submodule(path), name, other)
    restore(model)
    for one in (eager, model):
        one[0].stride, one[5].eps = (1, 1), 0.5
    assert torch.equal(output_of(model, IMAGE), output_of(eager, IMAGE))


def test_a_bias_that_is_taken_away_is_refused_in_words() -> None:
    model = accelerate_for_cpu(forking(), dtype="float32")
    model[3].second.bias = None
    with pytest.raises(RuntimeError, match=r"3\.second\.bias was removed .*restore"):
        output_of(model, IMAGE)
