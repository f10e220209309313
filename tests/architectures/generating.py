"""Text of a model type that generates: the tokens of the accelerated model are those of eager, from replayed steps, too."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from hf_cpu_accel import accelerate_for_cpu
from tests.architectures.find import told
from tests.architectures.models import build, classes_of
from tests.architectures.small import exceptions

_TOKENS = 24
_TIE = 1e-3  # of the spread of the scores
_SETTINGS = {
    "max_new_tokens": _TOKENS,
    "min_new_tokens": _TOKENS,
    "do_sample": False,
    "pad_token_id": 0,
    "eos_token_id": None,
    "output_scores": True,
    "return_dict_in_generate": True,
}


def generation_problems(model_type: str, config: PretrainedConfig) -> list[str]:
    """Where text that the accelerated model writes in float32 is another than eager's, of prompts that eager can go on with."""
    if "generates" in exceptions().get(model_type, {}):
        return []
    eager = _generating(model_type, config)
    if eager is None:
        return []
    ours = accelerate_for_cpu(copy.deepcopy(eager), dtype="float32")
    problems = []
    for name, prompt in _prompts(eager).items():
        for beams in (1, 3):
            settings = {**_SETTINGS, **prompt, "num_beams": beams}
            try:
                expected = _text_of(eager, settings)
            except Exception:  # it takes no tokens alone
                continue
            title = f"generate, {name}" + (f", {beams} beams" if beams > 1 else "")
            try:
                problem = _difference(_text_of(ours, settings), expected, beams)
            except Exception as error:
                problem = told(error)
            if problem:
                problems.append(f"{title}: {problem}")
    return problems


def _text_of(model: Any, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)  # speech is written from noise
    return model.generate(**settings)


def _generating(model_type: str, config: PretrainedConfig) -> Any:
    """A model of that config with a `generate`, or None."""
    for cls in classes_of(model_type, config):
        if not hasattr(cls, "generate"):
            continue
        try:
            model: PreTrainedModel = build(cls, config)
        except Exception:  # what cannot be built is told of elsewhere
            continue
        if model.can_generate():  # type: ignore[operator]
            return model
    return None


def _prompts(model: Any) -> dict[str, dict[str, Tensor]]:
    vocabulary = min(50, getattr(model.config.get_text_config(decoder=True), "vocab_size", 50))
    ids = torch.randint(3, vocabulary, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    padded = mask.clone()
    padded[0, :2] = 0
    return {
        "plain": {"input_ids": ids, "attention_mask": mask},
        "padded": {"input_ids": ids, "attention_mask": padded},
    }


def _difference(output: Any, expected: Any, beams: int) -> str | None:
    """Where two texts part, if not where eager was undecided between two tokens."""
    ours, theirs = getattr(output, "sequences", output), getattr(expected, "sequences", expected)
    if torch.equal(ours, theirs):
        return None
    if beams > 1:  # scores are of beams, in another order if one of them is
        near = (output.sequences_scores - expected.sequences_scores).abs().max().item()
        return None if near < _TIE else f"beams score {near:.2g} apart"
    parts = int((ours != theirs).nonzero()[:, 1].min()) - (theirs.shape[1] - len(expected.scores))
    scores, other = expected.scores[parts], output.scores[parts]
    finite = scores.isfinite()
    error = ((scores - other).abs()[finite].max() / scores[finite].std()).item()
    return None if error < _TIE else f"scores of token {parts} are {error:.2g} of their spread off"
