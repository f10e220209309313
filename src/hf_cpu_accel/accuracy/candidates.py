"""The dtypes that may be chosen, the fastest first, and how much faster they are, as known of the instructions of this CPU."""

from __future__ import annotations

from torch import nn

from hf_cpu_accel import extension
from hf_cpu_accel.runtime import hardware

# Products of 8 to 128 rows against float32's, by 768 x 3072 weights on one core: of a Zen 4 that was held to each tier, and of a
# Xeon with AMX (geometric means). Tiers between "avx512_vnni" and "amx" have the integer products of the former at least.
_PRODUCTS = {"int8": 1.8, "int8-weight": 1.0, "bfloat16": 1.0, "float32": 1.0}
_PRODUCTS_WITHOUT_VNNI = {**_PRODUCTS, "int8": 1.7, "int8-weight": 1.5}
_PRODUCTS_OF_VNNI = {**_PRODUCTS, "int8": 3.3, "int8-weight": 1.9}
_NATIVE_BFLOAT16 = 1.9
_PRODUCTS_OF_AMX = {"int8": 6.9, "int8-weight": 4.8, "bfloat16": 3.6, "float32": 1.0}
_BITS = {"float32": 32.0, "bfloat16": 16.0, "int8": 8.0, "int8-weight": 8.0, "int4": 4.25}


def candidates(model: nn.Module, weights: int | None = None) -> tuple[str, ...]:
    """Those for `model`, the fastest first.

    Text that is generated waits for the weights to be read, once for each token: there a dtype is as fast as it is small, and int4
    is one of them where the weights do not stay in the cache. Elsewhere it is as fast as its products are, and int4's are int8's.

    Args:
        weights: how many numbers they have, where its parameters do not tell.
    """
    if generates(model):
        if weights is None:
            weights = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() >= 2)
        from_memory = weights > (hardware.detect().l3 or 0)  # as bytes of int8
        return ("int4",) * from_memory + ("int8", "int8-weight", "bfloat16", "float32")
    products = _products()
    worthless = 1.0 < products["bfloat16"] >= products["int8-weight"]  # bfloat16 is as fast and nearer
    return ("int8", *("int8-weight",) * (not worthless), "bfloat16", "float32")


def bits_of(dtype: str) -> float:
    """Of one number of a weight."""
    return _BITS[dtype]


def gain(dtype: str, than: str, *, generates: bool) -> float:
    """How many times as fast `dtype` may be as `than`: by the bytes of a weight where text is generated, else by products."""
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
    """Whether `model` is one of transformers that writes text, without an encoder that it reads."""
    can_generate = getattr(model, "can_generate", None)
    config = getattr(model, "config", None)
    return (
        callable(can_generate) and bool(can_generate()) and not getattr(config, "is_encoder_decoder", False)
    )
