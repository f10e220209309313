"""Text generated with and without replayed steps."""

from __future__ import annotations

import pytest
import torch
from transformers import FalconH1Config, FalconH1ForCausalLM, LogitsProcessor

from hf_cpu_accel.generate.replay import steps
from hf_cpu_accel.generate.replay.program import Program
from hf_cpu_accel.generate.speculation.request import SpeculationRequest

SETTINGS = {
    "do_sample": False,
    "max_new_tokens": 40,
    "min_new_tokens": 40,
    "eos_token_id": None,
    "pad_token_id": 0,
    "return_dict_in_generate": True,
    "output_scores": True,
}


def count_replayed(monkeypatch):
    """Return a list that gets an entry for each step that is replayed from now on: whether it was as predicted."""
    found, run = [], Program.run

    def counted(self, inputs, step, **options):
        logits = run(self, inputs, step, **options)
        found.append(logits is not None)
        return logits

    monkeypatch.setattr(Program, "run", counted)
    return found


def generate(model, inputs, *, replay, **settings):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpeculationRequest, "by_default", lambda _: None)  # one call per token
        if not replay:
            patch.setattr(steps, "_can_be_captured", lambda *_: False)
        return model.generate(**inputs, **{**SETTINGS, **settings})


def assert_equal(model, inputs, **settings):
    generate(
        model, inputs, replay=False, **settings
    )  # the first call of a model may be made by other providers
    expected = generate(model, inputs, replay=False, **settings)
    output = generate(model, inputs, replay=True, **settings)
    assert torch.equal(output.sequences, expected.sequences)
    assert len(output.scores) == len(expected.scores)
    assert all(map(torch.equal, output.scores, expected.scores))


class Once(LogitsProcessor):
    """Calls `action` when there are so many tokens."""

    def __init__(self, tokens, action):
        self.tokens, self.action = tokens, action

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == self.tokens:
            self.action()
        return scores


def falcon_h1():
    torch.manual_seed(0)
    config = FalconH1Config(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        mamba_d_ssm=128,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
    )
    return FalconH1ForCausalLM(config).eval()
