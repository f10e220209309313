"""Decide which calls of `generate` the decode loop and the cache support. transformers handles all others."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerationMode

from hf_cpu_accel.generate.inputs import CACHE
from hf_cpu_accel.hosts.arguments import CACHES, parameters_of

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
# With a drafter, these give what the others give, in fewer calls.
DECODE_MODES = (*MODES, GenerationMode.ASSISTED_GENERATION)
BEAM_MODES = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
# Arguments besides the prompt that do not change between tokens: of the model, and one for stop strings.
_MODEL_INPUTS = {
    "input_ids",
    "attention_mask",
    "position_ids",
    "inputs_embeds",
    *CACHES,
    "encoder_outputs",
    "decoder_input_ids",
    "decoder_attention_mask",
    "logits_to_keep",
    "tokenizer",
}
# Arguments of `generate` and settings which change the loop itself.
_ARGUMENTS = (
    "assistant_tokenizer",
    "synced_gpus",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "return_token_timestamps",
)
_SETTINGS = (
    "output_attentions",
    "output_hidden_states",
    "token_healing",
    "compile_config",
    "is_assistant",
    "return_token_timestamps",  # asks for attentions on the way
)
NO_KEYS = "its cache holds state other than keys and values"
# Methods of `GenerationMixin` whose overrides change the loop.
_PARTS = ("generate", "_sample", "_prefill", "_update_model_kwargs_for_generation")
_BEAM_PARTS = (
    "_beam_search",
    "_get_top_k_continuations",
    "_get_running_beams_for_next_iteration",
    "_update_finished_beams",
    "_check_early_stop_heuristic",
    "_beam_search_has_unfinished_sequences",
    "_reorder_cache",
)


@dataclass(frozen=True)
class Request:
    """One call of `generate`: its named arguments, its other keywords, and the settings from both and the model."""

    arguments: Mapping[str, Any]
    keywords: Mapping[str, Any]
    settings: GenerationConfig

    @classmethod
    def of(cls, model: Any, stock: Callable[..., Any], args: Any, kwargs: Any) -> Request | None:
        """Return the call `stock(*args, **kwargs)`, or None if the arguments do not fit or have no settings."""
        signature = inspect.signature(stock)
        try:
            arguments = dict(signature.bind(*args, **kwargs).arguments)
        except TypeError:
            return None
        keywords: dict[str, Any] = {}
        for parameter in signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                keywords = arguments.pop(parameter.name, {})
        given = arguments.get("generation_config")
        if not isinstance(model.generation_config, GenerationConfig) or not isinstance(
            given, GenerationConfig | None
        ):
            return None
        settings = copy.copy(model.generation_config)
        chosen = {} if given is None else {k: v for k, v in vars(given).items() if v is not None}
        for name, value in {**chosen, **keywords}.items():
            if hasattr(settings, name):
                setattr(settings, name, value)
        return cls(arguments, keywords, settings)

    def gets_cache(self) -> bool:
        """Return whether `generate` would create a `DynamicCache` by default."""
        return (
            self.arguments.get("custom_generate") is None
            and self.cache is None
            and self.settings.use_cache is not False
            # transformers also treats "hybrid" in an old config as no choice.
            and self.settings.cache_implementation in (None, "hybrid")
        )

    def gets_loop(self, model: Any) -> bool:
        """Return whether `decode` or `beam_search`, depending on `mode`, supports the call."""
        settings, cache = self.settings, self.cache
        extra = {name for name, value in self.keywords.items() if value is not None} - _MODEL_INPUTS
        chunked = settings.prefill_chunk_size is not None
        return (
            self.arguments.get("custom_generate") is None
            and settings.use_cache is not False
            and settings.cache_implementation in (None, "hybrid")
            and (
                cache is None
                or not (getattr(cache, "is_compileable", True) or model.config.is_encoder_decoder)
            )
            and not any(self.arguments.get(name) is not None for name in _ARGUMENTS)
            and not any(getattr(settings, name, None) for name in _SETTINGS)
            and (not settings.stop_strings or self._takes_stop_strings(model))
            and not (chunked and model.config.is_encoder_decoder)
            and not any(not hasattr(settings, name) for name in extra)
            and (self.mode in DECODE_MODES or (self.mode in BEAM_MODES and beam_refusal(model) is None))
            and not torch.compiler.is_compiling()
        )

    def as_given(self) -> dict[str, Any]:
        """Return the arguments of `generate` for a loop of this package, which has its own ways to draft and gets stop strings as a
        criterion: `generate` does not pass a tokenizer on to it."""
        given = {**self.arguments, **self.keywords}
        for name in ("assistant_model", "tokenizer", "stop_strings"):
            given.pop(name, None)
        if self.settings.stop_strings:
            criterion = StopStringCriteria(self.keywords["tokenizer"], self.settings.stop_strings)
            given["stopping_criteria"] = StoppingCriteriaList(
                [*(given.get("stopping_criteria") or ()), criterion]
            )
            if given.get("generation_config") is not None:
                given["generation_config"] = config = copy.copy(given["generation_config"])
                config.stop_strings = None
        return given

    def _takes_stop_strings(self, model: Any) -> bool:
        """Return whether this call alone brings stop strings, and a tokenizer; those of the model would come back."""
        return model.generation_config.stop_strings is None and self.keywords.get("tokenizer") is not None

    @property
    def cache(self) -> Any:
        """Return the cache that the caller passes, under its current or an old name, or None."""
        return next((self.keywords[name] for name in CACHES if self.keywords.get(name) is not None), None)

    @property
    def mode(self) -> GenerationMode:
        mode: GenerationMode = self.settings.get_generation_mode(self.assistant)
        return mode

    @property
    def assistant(self) -> Any:
        """Return the model that is to draft tokens, or None."""
        return self.arguments.get("assistant_model")

    def sequences(self) -> int:
        """Return the number of sequences to generate."""
        embeds = self.keywords.get("inputs_embeds")
        prompt = embeds if self.prompt is None else self.prompt
        prompts = len(prompt) if isinstance(prompt, Tensor) else 1
        return prompts * int(self.settings.num_return_sequences or 1)

    @property
    def prompt(self) -> Tensor | None:
        """Return the prompt [batch, prompt length, ...], or None."""
        given = self.arguments.get("inputs")
        given = self.keywords.get("input_ids") if given is None else given
        return given if isinstance(given, Tensor) else None

    def check_prompt(self) -> None:
        """Check that the prompt has tokens; transformers fails later, in the middle of some computation.

        Raises:
            ValueError: the prompt is empty.
        """
        prompt = self.prompt
        if (
            prompt is not None
            and prompt.dim() == 2
            and prompt.shape[1] == 0
            and self.keywords.get("inputs_embeds") is None
        ):
            raise ValueError(
                f"input_ids of shape {tuple(prompt.shape)} is an empty prompt: pass at least one token"
            )

    def mask_length(self) -> int | None:
        """Return the number of columns of the attention mask: the one that was passed, or one over the prompt."""
        mask = self.keywords.get("attention_mask")
        mask = self.prompt if mask is None else mask
        return None if mask is None else int(mask.shape[1])


def loop_refusal(model: Any) -> str | None:
    """Return why the loops of this package support no call of this model's `generate`, or None if they support some."""
    parts = [part for part in _PARTS if part != "generate" or not generates_by_segment(model)]
    return _own_way(model, parts) or (None if takes_cache(model) else NO_KEYS)


def generates_by_segment(model: Any) -> bool:
    """Return whether the model has the `generate` of Whisper. It calls `GenerationMixin.generate` for each segment, at several
    temperatures where the text looks wrong, and passes unknown arguments on, such as a `custom_generate`."""
    return hasattr(type(model), "generate_with_fallback")


def beam_refusal(model: Any) -> str | None:
    """Return why `beam_search` supports no call of this model, or None if it supports some."""
    return loop_refusal(model) or _own_way(model, _BEAM_PARTS)


def _own_way(model: Any, parts: Sequence[str]) -> str | None:
    changed = [
        name for name in parts if getattr(type(model), name, None) is not getattr(GenerationMixin, name, None)
    ]
    return f"{type(model).__name__} overrides {changed[0]}" if changed else None


def takes_cache(model: Any) -> bool:
    """Return whether the forward of the model takes the cache that `generate` creates."""
    return CACHE in parameters_of(model.forward)
