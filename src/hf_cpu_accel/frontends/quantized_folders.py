"""Checkpoints that other tools quantized: during a load, transformers loads their weights into linears of this package.

The quantizers of transformers for these methods need packages and accelerators, or dequantize the weights.
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
# Fields of configs with experts, whose weights transformers joins, and dequantizes for the methods below.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_DEQUANTIZED_BY_HOST = ("compressed-tensors", "fp8")

# Whether the current load keeps quantized weights in their format.
_keeps_stored: ContextVar[bool] = ContextVar("keeps_stored", default=False)


def weights_as_stored() -> AbstractContextManager[None]:
    """Make transformers load quantized weights in their format inside the context."""
    return within(_keeps_stored, True)


def patch_quantizer_choice(module: Any, patches: HostPatches) -> None:
    """Patch `get_hf_quantizer` of transformers.modeling_utils, which chooses a quantizer for the config of a model."""
    function: Callable[..., Any] = module.get_hf_quantizer

    @functools.wraps(function)
    def choose(config: Any, quantization_config: Any, device_map: Any, *args: Any, **kwargs: Any) -> Any:
        settings = _settings_of(config)
        is_supported = (
            patches.active
            and _keeps_stored.get()
            and quantization_config is None
            and _is_supported(settings, config)
        )
        if not is_supported:
            return function(config, quantization_config, device_map, *args, **kwargs)
        from hf_cpu_accel.frontends.stored_quantizer import StoredConfig, StoredQuantizer

        assert settings is not None
        check_placement(device_map=device_map)
        config.quantization_config = StoredConfig(**settings)
        quantizer = StoredQuantizer(config.quantization_config, has_experts=_has_experts(config))
        return quantizer, config, device_map

    patches.replace(module, "get_hf_quantizer", choose)


def _settings_of(config: Any) -> dict[str, Any] | None:
    """Return `quantization_config` of a config, or of the config of its language model."""
    text = config.get_text_config(decoder=True)
    settings = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    return dict(settings) if isinstance(settings, Mapping) else None


def _is_supported(settings: Mapping[str, Any] | None, config: Any) -> bool:
    method = None if settings is None else settings.get("quant_method")
    if method not in METHODS:
        return False
    assert settings is not None
    return method not in _DEQUANTIZED_BY_HOST or not _has_experts(config) or _has_integers(settings)


def _has_experts(config: Any) -> bool:
    text = config.get_text_config(decoder=True)
    return any(getattr(text, name, None) for name in _EXPERTS)


def _has_integers(settings: Mapping[str, Any]) -> bool:
    """Return whether all weights of a compressed-tensors config are integers."""
    groups = settings.get("config_groups")
    weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, dict) else []
    return bool(weights) and all(one.get("type", "int") == "int" for one in weights)
