"""State that a recording cannot see: outside of modules, globals, optional dimensions, tools of other threads."""

from __future__ import annotations

import copy
import cProfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu
from tests.rewrite.capture.models import Stack, Written
from tests.rewrite.capture.test_program_layer import called, error, in_use, plain, reasons, run, states

GAIN = 2.0
SETTINGS = SimpleNamespace(gain=2.0)


def twice(hidden: Tensor) -> Tensor:
    return hidden * 2


class Reading(Written):
    """Reads a value that is no attribute of the module when it is recorded, or no number."""

    gain = 2.0

    def __init__(self) -> None:
        super().__init__(plain)
        self.gains = {"left": 2.0, "right": [1.0, 2.0]}
        self.register_parameter("shift", None)
        self.register_buffer("table", None)
        self.long = [1.0] * 100
        self.options = SimpleNamespace(inner=SimpleNamespace(gain=2.0))

    def forward(self, hidden: Tensor) -> Tensor:
        output = super().forward(hidden) * self.gain * self.gains["left"] * self.gains["right"][1]
        output = output * GAIN * SETTINGS.gain * self.long[77] * self.options.inner.gain
        output = twice(output) * getattr(self, "late", 1.0)
        if self.shift is not None:
            output = output + self.shift
        if self.table is not None:
            output = output + self.table
        if getattr(self, "added", None) is not None:
            output = output * self.added
        return output


def shadowed(layer: Any) -> None:
    layer.gain = 3.0


def of_the_class(layer: Any) -> None:
    Reading.gain = 3.0


def in_a_dictionary(layer: Any) -> None:
    layer.gains["left"] = 3.0


def in_a_list_in_it(layer: Any) -> None:
    layer.gains["right"][1] = 3.0


def in_a_long_list(layer: Any) -> None:
    layer.long[77] = 3.0


def deep_in_an_object(layer: Any) -> None:
    layer.options.inner.gain = 3.0


def a_new_attribute(layer: Any) -> None:
    layer.late = 3.0


def no_longer_none(layer: Any) -> None:
    layer.shift = nn.Parameter(torch.ones(64))


def a_buffer_that_was_none(layer: Any) -> None:
    layer.table = torch.ones(64)


def a_new_parameter(layer: Any) -> None:
    layer.register_parameter("added", nn.Parameter(torch.full((64,), 3.0)))


def a_new_buffer(layer: Any) -> None:
    layer.register_buffer("added", torch.full((64,), 3.0))


def another_class(layer: Any) -> None:
    class Negated(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            return -super().forward(input)

    layer.norms[1] = Negated(64)
    layer.norms[1].register_forward_hook(lambda module, args, output: 2 * output)


def a_global(layer: Any) -> None:
    globals()["GAIN"] = 3.0


def a_global_object(layer: Any) -> None:
    SETTINGS.gain = 3.0


def a_global_function(layer: Any) -> None:
    globals()["twice"] = lambda hidden: hidden * 3


CHANGES = [
    *(shadowed, of_the_class, in_a_dictionary, in_a_list_in_it, in_a_long_list, deep_in_an_object),
    *(a_new_attribute, no_longer_none, a_buffer_that_was_none, a_new_parameter, a_new_buffer, another_class),
    *(a_global, a_global_object, a_global_function),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_read_besides_attributes_counts(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GAIN", "twice"):
        monkeypatch.setitem(globals(), name, globals()[name])
    monkeypatch.setattr(SETTINGS, "gain", SETTINGS.gain)
    monkeypatch.setattr(Reading, "gain", Reading.gain)
    torch.manual_seed(0)
    model = Stack(Reading(), Reading()).eval()
    eager, hidden = copy.deepcopy(model), states(2, 7)
    accelerate_for_cpu(model, dtype="float32")
    for _ in range(3):
        assert error(run(model, hidden), run(eager, hidden)) <= 1e-5
    assert len(in_use(model)) == 2
    before = run(eager, hidden)
    torch.manual_seed(1)
    change(model.layers[0])
    torch.manual_seed(1)
    change(eager.layers[0])
    assert error(run(eager, hidden), before) > 1e-3
    for _ in range(3):
        assert error(run(model, hidden), run(eager, hidden)) <= 1e-5


def test_a_dimension_that_is_squeezed_away() -> None:
    class Squeezing(Written):
        def forward(self, hidden: Tensor) -> Tensor:
            output = super().forward(hidden)
            squeezed = output.sum(1).squeeze()
            return output + (squeezed[:, None] if squeezed.dim() == 2 else squeezed) * 2

    given = [(states(batch, 7),) for batch in (2, 3, 4, 1, 5, 1)]
    assert max(called(Squeezing(plain), *given)[1]) <= 1e-5


def test_rows_that_are_repeated_are_compared_first() -> None:
    """A number of rows that was not one, and then is."""

    class Ambiguous(Written):
        def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
            return super().forward(hidden) + bias

    shapes = [(4, 4), (3, 3), (5, 5), (6, 1), (1, 6), (4, 4), (1, 1)]
    given = [(states(a, 7), torch.randn(b, 7, 64)) for a, b in shapes]
    assert max(called(Ambiguous(plain), *given, *given)[1]) <= 1e-5


def test_sizes_are_ints() -> None:
    class Asking(Written):
        def forward(self, hidden: Tensor, window: Any) -> Tensor:
            output = super().forward(hidden)
            if isinstance(window, int) and isinstance(hidden.shape[1], int):
                output = output * (torch.arange(hidden.shape[1]) < window)[:, None]
            return output

    lengths = [7, 8, 20, 7, 30]
    model, errors = called(Asking(plain), *[(states(2, length), 16) for length in lengths])
    assert max(errors) <= 1e-5
    assert in_use(model)


def test_another_default_dtype() -> None:
    class Defaulting(Written):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden).to(torch.get_default_dtype()).double()

    class Narrow(Stack):
        def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
            for layer in self.layers:
                hidden = layer(hidden.float())
            return hidden

    model = Narrow(Defaulting(plain), Defaulting(plain)).eval()
    eager, hidden = copy.deepcopy(model), states(2, 7)
    accelerate_for_cpu(model, dtype="float32")
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            for _ in range(3):
                assert error(run(model, hidden), run(eager, hidden)) <= (
                    1e-5 if dtype is torch.float32 else 0.02
                )
        finally:
            torch.set_default_dtype(torch.float32)


def test_a_call_that_fails_is_not_the_last_to_be_recorded() -> None:
    class Careful(Written):
        def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
            if bias.shape[-1] != hidden.shape[1]:
                raise ValueError("another bias is needed")
            return super().forward(hidden, bias)

    model = accelerate_for_cpu(Stack(Careful(plain), Careful(plain)).eval(), dtype="float32")
    with pytest.raises(ValueError, match="another bias"):
        run(model, states(2, 7), torch.zeros(1, 1, 7, 5))
    for _ in range(2):
        run(model, states(2, 7), torch.zeros(1, 1, 7, 7))
    assert len(in_use(model)) == 2
    assert not reasons(model)


def test_a_profiler_goes_on_seeing_what_runs() -> None:
    model = accelerate_for_cpu(Stack(Written(plain), Written(plain)).eval(), dtype="float32")
    hidden = states(2, 7)
    with cProfile.Profile() as profiler:
        expected = run(model, hidden)
        marked()
    assert any("marked" in str(entry.code) for entry in profiler.getstats())
    for _ in range(2):
        assert error(run(model, hidden), expected) <= 1e-5
    assert len(in_use(model)) == 2


def marked() -> None:
    """Called behind what could have ended a profile."""


def test_gradients_that_are_asked_for_anywhere_are_refused() -> None:
    model = accelerate_for_cpu(Stack(Written(plain), Written(plain)).eval(), dtype="float32")
    hidden, bias = states(2, 7), torch.zeros(2, 1, 7, 7)
    for _ in range(2):
        run(model, hidden, bias)
    with pytest.raises(RuntimeError, match="requires a gradient"):
        model(hidden, bias.requires_grad_())


def test_a_copy_that_may_be_none_is_not_written_to() -> None:
    """The forward would write to the original, and so would the steps that are compared with it."""

    class Careless(Written):
        def forward(self, hidden: Tensor, offset: Tensor) -> Tensor:
            flat = offset.reshape(-1)
            flat.add_(1)
            return super().forward(hidden) + flat.view(offset.shape)

    torch.manual_seed(0)
    model = Stack(Careless(plain), Careless(plain)).eval()
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    for offset in (torch.randn(64, 7).t(), torch.randn(9, 64), torch.randn(9, 64), torch.randn(64, 8).t()):
        hidden, own = states(2, len(offset)), offset.clone()
        assert error(run(model, hidden, own), run(eager, hidden, offset)) <= 1e-5
        assert torch.equal(own, offset)
