"""The candidate dtypes, the fastest first, and their modeled speedups for the instructions of this CPU."""

from __future__ import annotations

from torch import nn

from hf_cpu_accel import extension
from hf_cpu_accel.runtime import hardware

# Speedups of products over float32, for 8 to 128 rows and 768 x 3072 weights on one core (geometric means). Measured on a Zen 4
# that was capped to each tier, and on a Xeon with AMX. Tiers between "avx512_vnni" and "amx" have at least the integer products
# of "avx512_vnni".
_PRODUCTS = {"int8": 1.8, "int8-weight": 1.0, "bfloat16": 1.0, "float32": 1.0}
_PRODUCTS_WITHOUT_VNNI = {**_PRODUCTS, "int8": 1.7, "int8-weight": 1.5}
_PRODUCTS_OF_VNNI = {**_PRODUCTS, "int8": 3.3, "int8-weight": 1.9}
_NATIVE_BFLOAT16 = 1.9
_PRODUCTS_OF_AMX = {"int8": 6.9, "int8-weight": 4.8, "bfloat16": 3.6, "float32": 1.0}
_BITS = {"float32": 32.0, "bfloat16": 16.0, "int8": 8.0, "int8-weight": 8.0, "int4": 4.25}


def candidates(model: nn.Module, weights: int | None = None) -> tuple[str, ...]:
    """Return the candidate dtypes for a model, the fastest first.

    Text generation reads all weights for each token, so a smaller dtype is faster. int4 is a candidate if the weights do not fit in
    the L3 cache. For other models, the speed of the products decides, and the products of int4 are those of int8.

    Args:
        model: the model.
        weights: number of weights; None to count the parameters.
    """
    if generates(model):
        if weights is None:
            weights = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() >= 2)
        from_memory = weights > (hardware.detect().l3 or 0)  # as bytes of int8
        return ("int4",) * from_memory + ("int8", "int8-weight", "bfloat16", "float32")
    products = _products()
    is_useless = (
        1.0 < products["bfloat16"] >= products["int8-weight"]
    )  # bfloat16 is as fast and more accurate
    return ("int8", *("int8-weight",) * (not is_useless), "bfloat16", "float32")


def bits_of(dtype: str) -> float:
    """Return the bits per weight of a dtype."""
    return _BITS[dtype]


def gain(dtype: str, than: str, *, generates: bool) -> float:
    """Return the modeled speedup of `dtype` over `than`: by the bytes of weights for text generation, or else by products."""
    if generates:
        return _BITS[than] / _BITS[dtype]
    products = _products()
    return products[dtype] / products[than]


def _products() -> dict[str, float]:
    status = extension.status()
    if status.tier == "amx":
        return _PRODUCTS_OF_AMX
    products = _PRODUCTS if status.tier in ("generic", None) else _PRODUCTS_OF_VNNI
    if hardware.lacks_vnni():
        products = _PRODUCTS_WITHOUT_VNNI
    return {**products, "bfloat16": _NATIVE_BFLOAT16} if status.bf16_dot else products


def generates(model: nn.Module) -> bool:
    """Return whether `model` is a decoder-only model of transformers that generates text."""
    can_generate = getattr(model, "can_generate", None)
    config = getattr(model, "config", None)
    return (
        callable(can_generate) and bool(can_generate()) and not getattr(config, "is_encoder_decoder", False)
    )
