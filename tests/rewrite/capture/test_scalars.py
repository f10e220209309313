"""A selection between tensors and numbers has the dtype of torch, for either choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.rewrite.capture.models import Written
from tests.rewrite.capture.test_program_layer import called, in_use, plain, states


@pytest.mark.parametrize("made", [float, torch.tensor], ids=["number", "tensor"])
def test_integers_become_what_is_chosen_instead(made: Callable[[float], Any]) -> None:
    class Counted(Written):
        def forward(self, hidden: Tensor, counts: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(hidden) * torch.where(counts >= 0, counts, made(0.5))

    calls = [(states(2, 7), torch.tensor(counts)) for counts in ([1], [2], [-1], [3], [-2])]
    model, errors = called(Counted(plain), *calls)
    assert max(errors) <= 1e-5
    assert in_use(model)
