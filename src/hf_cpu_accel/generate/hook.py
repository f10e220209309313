"""Install the cache and the decode loop behind `generate` of a model, through methods that transformers lets a model override."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache, GenerationMixin
from transformers.generation import GenerationMode

from hf_cpu_accel.generate.beams import beam_search
from hf_cpu_accel.generate.cache import CPUCache, CPUCacheLayer, CPUCrossCache, cache_refusal
from hf_cpu_accel.generate.continuous import StartSession
from hf_cpu_accel.generate.coverage import (
    DECODE_MODES,
    NO_KEYS,
    Request,
    beam_refusal,
    loop_refusal,
    takes_cache,
)
from hf_cpu_accel.generate.decode import NotCovered, decode
from hf_cpu_accel.generate.inputs import CACHE
from hf_cpu_accel.generate.speculation.draft import Speculation
from hf_cpu_accel.generate.speculation.request import SpeculationRequest, speculation_refusal
from hf_cpu_accel.hosts.arguments import NATIVE_ATTENTION
from hf_cpu_accel.patching.override import Override
from hf_cpu_accel.patching.restore import Journal, add_attribute
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.runtime.context import within

_CACHE = "KV cache"
_LOOP, _BEAMS = "greedy search and sampling", "beam search"
_SPECULATION = "speculative decoding"
_BATCHING = "continuous batching"


class _Placing:
    """The cache that one call of `generate` uses in place of the `DynamicCache` that it created; `dtype` is the dtype of its
    storage."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self.theirs: Any = None
        self.ours: Any = None

    def of(self, cache: Any) -> Any:
        """Return the cache to use instead of `cache`: `cache` itself if it is not empty or cannot be replaced."""
        if cache is self.theirs and cache is not None:
            return self.ours
        ours = _in_place_of(cache, self.dtype)
        if ours is not cache:
            self.theirs, self.ours = cache, ours
        return ours


_placing: ContextVar[_Placing | None] = ContextVar("placing", default=None)


class Generate(Override):
    """`model.generate` of an accelerated model.

    Attributes:
        cache_dtype: dtype of the cache, or None for the dtype of the keys.
        speculates: whether to draft tokens without being asked to.
        speculation: counts the drafts of all calls.
    """

    name = "generate"

    def __init__(self, model: Any, cache_dtype: torch.dtype | None, *, speculates: bool) -> None:
        super().__init__(model)
        self.cache_dtype = cache_dtype
        self.speculates = speculates and speculation_refusal(model) is None
        self.speculation = Speculation()
        self.loops = loop_refusal(model) is None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stock = self.__wrapped__
        request = Request.of(self.model, stock, args, kwargs)
        if request is None:
            return stock(*args, **kwargs)
        request.check_prompt()
        with within(_placing, _Placing(self.cache_dtype) if request.gets_cache() else None):
            if self.loops and request.gets_loop(self.model):
                with contextlib.suppress(NotCovered):
                    return stock(**self._through(request))
            return stock(*args, **kwargs)

    def _through(self, request: Request) -> dict[str, Any]:
        """Return the arguments of a call that runs the loop of this package.

        Raises:
            NotCovered: it asks for drafts that this loop cannot verify.
        """
        speculation = SpeculationRequest.by_default(self.speculation) if self.speculates else None
        if request.mode is GenerationMode.ASSISTED_GENERATION:
            asked = SpeculationRequest.of(self.model, request.settings, request.assistant, self.speculation)
            unread = request.assistant is not None and request.prompt is None  # embeddings of this model
            if asked is None or unread or request.sequences() != 1:
                raise NotCovered
            speculation = asked
        return {**request.as_given(), "custom_generate": _loop(request, speculation)}


def _loop(request: Request, speculation: SpeculationRequest | None) -> Callable[..., Any]:
    """Return the `custom_generate` of a call. Models that generate by segment may use beams for some segments and sampling for
    others."""
    streamer, mask_length = request.arguments.get("streamer"), request.mask_length()

    def loop(model: Any, input_ids: Tensor, **given: Any) -> Any:
        if given["generation_config"].get_generation_mode() in DECODE_MODES:
            return decode(
                model, input_ids, streamer=streamer, mask_length=mask_length, speculation=speculation, **given
            )
        return beam_search(model, input_ids, mask_length=mask_length, **given)

    return loop


class PrepareInputs(Override):
    """`model.prepare_inputs_for_generation` of an accelerated model, where all loops read the cache."""

    name = "prepare_inputs_for_generation"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self.__wrapped__(*args, **kwargs)
        placing = _placing.get()
        if placing is None:
            return inputs
        cache = inputs.get(CACHE)
        if cache is None and type(kwargs.get(CACHE)) is CPUCache:
            # Phi-3 computes all tokens again with other frequencies beyond this length, and lets its forward create a cache.
            inputs[CACHE] = CPUCache(self.model.config, placing.dtype)
        elif cache is not None:
            inputs[CACHE] = placing.of(cache)
        return inputs


# Versions of transformers may lack some.
_OTHERS: tuple[type[Override], ...] = (PrepareInputs, StartSession)


def _in_place_of(cache: Any, dtype: torch.dtype | None) -> Any:
    """Return an empty cache of this package that stores the same, or `cache` itself."""
    if type(cache) is EncoderDecoderCache:
        decoder, encoder = cache.self_attention_cache, cache.cross_attention_cache
        if CPUCache.can_replace(decoder) and CPUCache.can_replace(encoder):
            return EncoderDecoderCache(CPUCache.like(decoder, dtype), CPUCrossCache.like(encoder, dtype))
        return cache
    return CPUCache.like(cache, dtype) if CPUCache.can_replace(cache) else cache


def install(
    model: Any, path: str, journal: Journal, cache_dtype: torch.dtype | None, *, speculates: bool
) -> list[PlanItem]:
    """Override the methods of `model` for generation, if it generates.

    Args:
        cache_dtype: dtype of the cache, or None for the dtype of the keys.
        speculates: whether to draft tokens without being asked to.
    """
    if not (issubclass(type(model), GenerationMixin) and model.can_generate()):
        return []
    path = f"{path}.generate".lstrip(".")
    overrides = (
        Generate(model, cache_dtype, speculates=speculates),
        *(kind(model) for kind in _OTHERS if hasattr(type(model), kind.name)),
    )
    taken = [override.name for override in overrides if override.name in vars(model)]
    if taken:
        return [PlanItem.left(path, _LOOP, f"its {taken[0]} is already replaced by other code")]
    if inspect.isabstract(CPUCacheLayer):  # a version with further abstract methods
        return [
            PlanItem.left(
                path,
                _CACHE,
                "the cache of transformers is used: the cache layers of this version are not supported",
            )
        ]
    for override in overrides:
        add_attribute(journal, model, override.name, override)
    return [*_cache_item(model, path, cache_dtype), *_loop_items(model, path)]


def _cache_item(model: Any, path: str, dtype: torch.dtype | None) -> list[PlanItem]:
    reason = cache_refusal(model.config) if takes_cache(model) else NO_KEYS
    if reason is not None:
        return [PlanItem.left(path, _CACHE, f"the cache of transformers is used: {reason}")]
    stored = "key dtype" if dtype is None else str(dtype).removeprefix("torch.")
    return [PlanItem(path, _CACHE, "cache", stored, packed_bytes=0, reason=None)]


def _loop_items(model: Any, path: str) -> list[PlanItem]:
    reason = loop_refusal(model)
    if reason is not None:
        return [PlanItem.left(path, _LOOP, f"the loop of transformers runs: {reason}")]
    others, refused = "the loop of transformers runs, with the cache above", beam_refusal(model)
    beams = PlanItem(path, _BEAMS, "beam_search", "float32", packed_bytes=0, reason=None)
    if refused is not None:
        beams = PlanItem.left(path, _BEAMS, f"{others}: {refused}")
    return [
        PlanItem(path, _LOOP, "decode", "float32", packed_bytes=0, reason=None),
        beams,
        _speculation_item(model, path),
        PlanItem.left(path, "other decoding", others),
        _batching_item(model, path),
    ]


def _speculation_item(model: Any, path: str) -> PlanItem:
    reason = speculation_refusal(model)
    if reason is not None:
        return PlanItem.left(path, _SPECULATION, f"the loop of transformers runs: {reason}")
    return PlanItem(path, _SPECULATION, "speculative_decode", "float32", packed_bytes=0, reason=None)


def _batching_item(model: Any, path: str) -> PlanItem:
    if model.config._attn_implementation != NATIVE_ATTENTION:
        return PlanItem.left(
            path, _BATCHING, "continuous batching runs with the paged attention of transformers"
        )
    return PlanItem(path, _BATCHING, "paged_attention", "key dtype", packed_bytes=0, reason=None)
