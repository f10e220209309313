"""The first call differs from later ones only in time, for every order of the modes of calls."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache as once
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.check import row_error
from tests.rewrite.capture import decoders as recorded
from tests.rewrite.core.first_call_cases import IDS, PIXELS
from tests.rewrite.decoder.decoder_families import DECODERS
from tests.rewrite.decoder.encoder_decoder_families import FAMILIES
from tests.rewrite.encoder_families import bert, vit
from tests.rewrite.recurrent import hybrids

Inputs = dict[str, Any]
PADDED = torch.ones_like(IDS)
PADDED[0, :3] = 0

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad": torch.enable_grad,
    "train": torch.no_grad,
}
RECURRENT = ("Mamba", "Lfm2", "FalconH1")
ENCODERS: dict[str, tuple[Callable[[], Any], Inputs]] = {
    "bert": (bert, {"input_ids": IDS, "attention_mask": PADDED.flip(1)}),
    "vit": (vit, {"pixel_values": PIXELS}),
}
DECODED: dict[str, tuple[Callable[[], Any], Inputs]] = {
    **{
        name: (DECODERS[name].build, {"input_ids": IDS, "attention_mask": PADDED})
        for name in ("gpt2", "llama")
    },
    **{
        name: (FAMILIES[name].build, {**FAMILIES[name].inputs(padded=True), "decoder_input_ids": IDS[:, :5]})
        for name in ("t5", "bart", "whisper")
    },
    **{
        name: (lambda name=name: hybrids.build(name), {"input_ids": IDS, "attention_mask": PADDED})
        for name in RECURRENT
    },
    "recorded": (lambda: recorded.build("doge"), {"input_ids": IDS}),
}


@once
def models(name: str) -> tuple[nn.Module, nn.Module]:
    """Return the eager model, and one that was accelerated and not called."""
    eager = (ENCODERS | DECODED)[name][0]()
    return eager, accelerate_for_cpu(copy.deepcopy(eager), dtype="float32")


@pytest.mark.parametrize("order", itertools.product(MODES, repeat=2), ids="-".join)
@pytest.mark.parametrize("name", ENCODERS | DECODED)
def test_calls_in_every_order_of_modes(name: str, order: tuple[str, str]) -> None:
    eager, accelerated = models(name)
    model, inputs = copy.deepcopy(accelerated), (ENCODERS | DECODED)[name][1]
    for mode in order:
        model.train(mode == "train")
        with MODES[mode]():
            if mode == "train":
                with pytest.raises(RuntimeError, match="runs inference only"):
                    model(**inputs)
                continue
            got, expected = _tensor(model(**inputs)), _tensor(eager(**inputs))
            tokens = inputs.get("attention_mask", torch.ones(got.shape[:-1])).bool()
            rows = tokens if tokens.shape == got.shape[:-1] else ...
            assert row_error(got[rows], expected[rows]) <= 1e-3


@pytest.mark.parametrize("order", itertools.product(list(MODES)[:3], repeat=2), ids="-".join)
@pytest.mark.parametrize("name", DECODED)
def test_a_cache_goes_on_in_another_mode(name: str, order: tuple[str, str]) -> None:
    if name in RECURRENT and order[0] == "inference_mode":
        order = (
            "inference_mode",
            "inference_mode",
        )  # eager layers cannot write to such states in other modes
    eager, accelerated = models(name)
    model = copy.deepcopy(accelerated)
    for _ in range(2):
        expected, got = (_continued(m, DECODED[name][1], order) for m in (eager, model))
        assert row_error(got, expected) <= 1e-3


def _continued(model: Any, inputs: Inputs, order: tuple[str, str]) -> Tensor:
    """The logits of one token more, in the second mode, behind a prompt in the first."""
    with MODES[order[0]]():
        output = model(**inputs, use_cache=True)
    name = next(key for key in ("cache_params", "past_key_values") if key in output)
    ids = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    more = {ids: IDS[:, :1], name: output[name]}
    if ids == "input_ids" and "attention_mask" in inputs:
        more["attention_mask"] = torch.cat([PADDED, PADDED[:, -1:]], dim=1)
    with MODES[order[1]]():
        return _tensor(model(**{**inputs, **more}, use_cache=True))


def _tensor(output: Any) -> Tensor:
    return next(value for value in output.values() if isinstance(value, Tensor)).detach()
