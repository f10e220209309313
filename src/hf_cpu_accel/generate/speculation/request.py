"""What a call of `generate` asks for that drafts tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from hf_cpu_accel.generate.cache import cache_refusal
from hf_cpu_accel.generate.inputs import CACHE
from hf_cpu_accel.generate.speculation.calls import Inputs, TextCalls
from hf_cpu_accel.generate.speculation.draft import SIZES, Drafter, Speculation
from hf_cpu_accel.generate.speculation.draft_model import ModelDrafter
from hf_cpu_accel.generate.speculation.lookup import LookupDrafter
from hf_cpu_accel.generate.speculation.steps import SpeculativeSteps
from hf_cpu_accel.hosts.arguments import parameters_of

# Settings of other ways to draft.
_OF_OTHER_LOOPS = ("assistant_early_exit", "assistant_ensemble_weight", "use_mtp", "speculation_type")


@dataclass(frozen=True)
class SpeculationRequest:
    """How to draft.

    Attributes:
        drafter: a function of the text, int64 [1, tokens], and its attention mask.
        most: maximum number of tokens to draft.
        exact_only: see `SpeculativeSteps`.
        statistics: counts what is drafted.
    """

    drafter: Callable[[Tensor, Tensor | None], Drafter]
    most: int
    exact_only: bool
    statistics: Speculation

    @classmethod
    def of(
        cls, model: Any, settings: GenerationConfig, assistant: Any, statistics: Speculation
    ) -> SpeculationRequest | None:
        """Return what the settings and the argument `assistant_model` ask for, or None if only transformers' loop supports that."""
        if speculation_refusal(model) is not None:
            return None
        if any(getattr(settings, name, None) not in (None, False) for name in _OF_OTHER_LOOPS):
            return None
        looked_up = settings.prompt_lookup_num_tokens
        if looked_up is not None:
            return cls(_lookup, looked_up, False, statistics) if looked_up > 0 else None
        if assistant is None or not _is_drafter_for(assistant, model):
            return None
        return cls(lambda ids, mask: ModelDrafter(assistant, ids, mask), SIZES[-1], False, statistics)

    @classmethod
    def by_default(cls, statistics: Speculation) -> SpeculationRequest:
        """Return what needs no request: drafts from the text where they change no bit."""
        return cls(_lookup, SIZES[-1], True, statistics)

    def steps(
        self, model: Any, inputs: Inputs, ids: Tensor, mask: Tensor | None, longest: int | None
    ) -> SpeculativeSteps | None:
        """Return the steps that go on with the text `ids`, int64 [1, tokens], or None if its cache cannot forget tokens."""
        cache = inputs.cache
        if len(ids) != 1 or not getattr(cache, "is_croppable", False):
            return None
        length = ids.shape[1]
        calls = TextCalls(model, inputs, length, None if longest is None else longest - length)
        drafter = self.drafter(ids, mask)
        return SpeculativeSteps(
            calls, drafter, self.most, length, longest, self.statistics, exact_only=self.exact_only
        )


def speculation_refusal(model: Any) -> str | None:
    """Return why no draft for this model can be verified here, or None if drafts can."""
    if model.config.is_encoder_decoder:
        return "its decoder reads the output of an encoder"
    return cache_refusal(model.config)


def _lookup(ids: Tensor, mask: Tensor | None) -> LookupDrafter:
    return LookupDrafter(ids[0].tolist())


def _is_drafter_for(assistant: Any, model: Any) -> bool:
    """Return whether `assistant` predicts the tokens of `model` from them alone."""
    verifies, drafts = model.config, assistant.config
    return (
        not drafts.is_encoder_decoder
        and CACHE in parameters_of(assistant.forward)
        and verifies.get_text_config().vocab_size == drafts.get_text_config().vocab_size
        and cache_refusal(drafts) is None
    )
