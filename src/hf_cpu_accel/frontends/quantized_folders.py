"""Folders whose weights other tools quantized: for the time of a load of ours, transformers loads them into our own linears.

Its own quantizers for these methods ask for packages and accelerators, or unpack the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from hf_cpu_accel.frontends.placement import check_placement
from hf_cpu_accel.runtime.context import within

if TYPE_CHECKING:
    from hf_cpu_accel.frontends.patches import HostPatches

METHODS = ("gptq", "awq", "compressed-tensors", "fp8")
# How a config says that there are experts, whose weights transformers joins: these it unpacks by itself, where it can.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_UNPACKED_BY_HOST = ("compressed-tensors", "fp8")

# Whether what is being loaded keeps its weights as they are stored.
_keeps_stored: ContextVar[bool] = ContextVar("keeps_stored", default=False)


def weights_as_stored() -> AbstractContextManager[None]:
    """What transformers loads inside keeps quantized weights as they are stored."""
    return within(_keeps_stored, True)


def patch_quantizer_choice(module: Any, patches: HostPatches) -> None:
    """transformers.modeling_utils: `get_hf_quantizer`, which chooses a quantizer by the config of a model."""
    function: Callable[..., Any] = module.get_hf_quantizer

    @functools.wraps(function)
    def choose(config: Any, quantization_config: Any, device_map: Any, *args: Any, **kwargs: Any) -> Any:
        said = _said_by(config)
        ours = (
            patches.active and _keeps_stored.get() and quantization_config is None and _is_ours(said, config)
        )
        if not ours:
            return function(config, quantization_config, device_map, *args, **kwargs)
        from hf_cpu_accel.frontends.stored_quantizer import StoredConfig, StoredQuantizer

        assert said is not None
        check_placement(device_map=device_map)
        config.quantization_config = StoredConfig(**said)
        quantizer = StoredQuantizer(config.quantization_config, has_experts=_has_experts(config))
        return quantizer, config, device_map

    patches.replace(module, "get_hf_quantizer", choose)


def _said_by(config: Any) -> dict[str, Any] | None:
    """`quantization_config` of a config, or of the one of its language model."""
    text = config.get_text_config(decoder=True)
    said = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    return dict(said) if isinstance(said, Mapping) else None


def _is_ours(said: Mapping[str, Any] | None, config: Any) -> bool:
    method = None if said is None else said.get("quant_method")
    if method not in METHODS:
        return False
    assert said is not None
    return method not in _UNPACKED_BY_HOST or not _has_experts(config) or _are_integers(said)


def _has_experts(config: Any) -> bool:
    text = config.get_text_config(decoder=True)
    return any(getattr(text, name, None) for name in _EXPERTS)


def _are_integers(said: Mapping[str, Any]) -> bool:
    """Whether a config of compressed-tensors has all weights in integers."""
    groups = said.get("config_groups")
    weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, dict) else []
    return bool(weights) and all(one.get("type", "int") == "int" for one in weights)
