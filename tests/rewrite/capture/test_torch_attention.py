"""Layers that call torch's attention themselves run this package's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_cpu_accel.rewrite.attention.processor import dot_product_attention
from tests.rewrite.capture.models import Written
from tests.rewrite.capture.test_program_layer import called, in_use, reasons, states


@pytest.mark.parametrize("dropout", [0.0, 1e-9])
def test_a_layer_that_calls_it(dropout: float) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        return scaled_dot_product_attention(query, key, value, bias, dropout)

    calls = [(states(batch, 7), *bias) for batch in (2, 3) for bias in ((), (torch.randn(1, 4, 7, 7),))]
    model, errors = called(Written(attend), *calls, *calls)
    assert max(errors) <= 1e-5
    assert bool(in_use(model)) is (dropout == 0)
    used = {step.function for recorded in in_use(model) for step in recorded.program.steps}
    assert (dot_product_attention in used) is (dropout == 0)
    assert (reasons(model) == set()) is (dropout == 0)
