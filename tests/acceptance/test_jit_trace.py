"""`torch.jit.trace` of an accelerated model, as services that came from IPEX have it: for other lengths and batches, too."""

from __future__ import annotations

import pytest
import torch
import transformers

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.providers import switch

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 99,
}


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("weights", [torch.float32, torch.float16])
@torch.no_grad()
def test_a_trace_serves_other_sizes(
    weights: torch.dtype, warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(switch.VARIABLE, "auto")  # as users have it: other providers are looked at
    model = transformers.BertModel(transformers.BertConfig(**SIZES)).eval().to(weights)
    accelerate_for_cpu(model, dtype="float32")
    ids = torch.randint(3, 99, (1, 40))  # rows enough that other providers are asked for
    if warm:
        model(ids)
    traced = torch.jit.trace(model, (ids,), strict=False)  # strict refuses outputs that are dictionaries
    for shape in ((1, 40), (1, 7), (3, 60)):
        ids = torch.randint(3, 99, shape)
        torch.testing.assert_close(traced(ids)["last_hidden_state"], model(ids).last_hidden_state)
