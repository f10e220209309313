"""Encoders of sentence-transformers: the keyword `cpu_optimize=` of their constructors, and `packed=` of their `save_pretrained`.

    model = SentenceTransformer("sentence-transformers/all-MiniLM-L6-v2", cpu_optimize="int8")
    model.save_pretrained("minilm-int8", packed=True)

`model_kwargs={"cpu_optimize": ...}` is equivalent to the keyword. It is not passed to the inner model, which would be accelerated
twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_cpu_accel.frontends import packed_saving
from hf_cpu_accel.frontends.keyword import with_keyword
from hf_cpu_accel.frontends.placement import KEYWORD, check_placement, without_strategy
from hf_cpu_accel.hosts.find import find
from hf_cpu_accel.hosts.models import is_model
from hf_cpu_accel.patching.acceleration import acceleration_of

if TYPE_CHECKING:
    from hf_cpu_accel.frontends.patches import HostPatches, Patch


def _patch_init(name: str) -> Patch:
    """Return the patch of the module that defines the encoder `name`."""

    def patch(module: ModuleType, patches: HostPatches) -> None:
        owner = getattr(module, name)
        function = vars(owner)["__init__"]
        wrapped = with_keyword(function, patches, functools.partial(_make, function))

        @functools.wraps(wrapped)
        def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
            wrapped(self, *args, **(_with_one_keyword(kwargs) if patches.active else kwargs))

        patches.replace(owner, "__init__", initialize)

    return patch


def _with_one_keyword(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Move `cpu_optimize` from `model_kwargs` to the arguments.

    Raises:
        ValueError: the keyword is in both.
    """
    model_kwargs = kwargs.get("model_kwargs") or {}
    if KEYWORD not in model_kwargs:
        return kwargs
    if kwargs.get(KEYWORD) is not None:
        raise ValueError(
            f"{KEYWORD}={kwargs[KEYWORD]!r} and model_kwargs={{'{KEYWORD}': {model_kwargs[KEYWORD]!r}}} set the same option: pass "
            "only one of them"
        )
    remaining = {name: value for name, value in model_kwargs.items() if name != KEYWORD}
    return {**kwargs, "model_kwargs": remaining, KEYWORD: model_kwargs[KEYWORD]}


def _make(
    initialize: Callable[..., None],
    accelerate: Callable[[Any], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    backend = kwargs.get("backend", "torch")
    if backend != "torch":
        raise ValueError(
            f"backend={backend!r} is not supported with {KEYWORD}; pass backend='torch', or leave {KEYWORD} out"
        )
    if kwargs.get("model_kwargs"):
        kwargs = {**kwargs, "model_kwargs": without_strategy(kwargs["model_kwargs"])}
    device_map = (kwargs.get("model_kwargs") or {}).get("device_map")
    check_placement(kwargs.get("device"), device_map)
    if kwargs.get("device") is None and device_map is None:
        kwargs = {**kwargs, "device": "cpu"}  # the default would be the first accelerator of the machine
    initialize(*args, **kwargs)
    # Encoders switch to eval mode only when they encode, but accelerating needs it now.
    accelerate(args[0].eval())


def patch_saving(module: ModuleType, patches: HostPatches) -> None:
    """Patch sentence_transformers.base.model: add the keyword `packed` to `save` and `save_pretrained` of all encoders."""
    for name in ("save", "save_pretrained"):
        patches.replace(module.BaseModel, name, _saving(vars(module.BaseModel)[name], patches))


def _saving(function: Callable[..., None], patches: HostPatches) -> Callable[..., None]:
    @functools.wraps(function)
    def save(self: Any, *args: Any, packed: bool | None = None, **kwargs: Any) -> None:
        if not patches.active:
            extra = {} if packed is None else {"packed": packed}
            return function(self, *args, **extra, **kwargs)
        if packed:
            packed_saving.check_accelerated(self)
        with ExitStack() as around:
            if packed is not None:
                around.enter_context(packed_saving.pipeline_saving(packed))
            for root in find(self):
                acceleration = acceleration_of(root.module)
                if acceleration is not None and not is_model(
                    root.module
                ):  # models save their originals themselves
                    around.enter_context(packed_saving.with_originals(root.module, acceleration))
            return function(self, *args, **kwargs)

    return save


PATCHES: dict[str, Patch] = {
    "sentence_transformers.base.model": patch_saving,
    "sentence_transformers.sentence_transformer.model": _patch_init("SentenceTransformer"),
    "sentence_transformers.cross_encoder.model": _patch_init("CrossEncoder"),
    "sentence_transformers.sparse_encoder.model": _patch_init("SparseEncoder"),
    "sentence_transformers.multi_vector_encoder.model": _patch_init("MultiVectorEncoder"),
}
