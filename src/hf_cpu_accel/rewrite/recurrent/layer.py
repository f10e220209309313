"""`FusedMixer`: a mixer with recurrence whose convolution, recurrence and norm are one op, between its packed projections."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache as once
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.hosts.arguments import CACHES
from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, Reference
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.recurrent.parts import Mixer, States

# By which hosts tell where one of several sequences in a row ends.
_PACKED = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
_REFUSED = (*_PACKED, "cache_params", *(name for name in CACHES if name != "cache"))
_DTYPES = (torch.float32, torch.bfloat16)


class FusedMixer(FusedModuleMixin):
    """Mixed into the mixer's own class: [B, L, C] -> [B, L, C].

    It computes its class's own forward where hooks look inside, while a graph is traced, for packed sequences, and with a cache
    whose states the op cannot write (one that records the past in order to be cropped).
    """

    _mixer: Mixer
    _names: tuple[str, ...]  # of the parameters of its forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        named = kwargs if not args else dict(zip(self._names, args, strict=False)) | kwargs
        output = self._fused(**named) if is_fused(self, named) else None
        return self._original_class.forward(self, *args, **kwargs) if output is None else output

    def _fused(
        self, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None, **_: Any
    ) -> Tensor | None:
        check_inference(self, hidden_states)
        hidden_states = ordinary(hidden_states)
        call = self.begin(hidden_states, cache, attention_mask)
        if call is None:
            return None
        return self._mixer.compute(self, call.masked(hidden_states), call.tokens, call.states)

    def begin(self, hidden_states: Tensor, cache: Any, attention_mask: Tensor | None) -> MixerCall | None:
        """What a call works with, whose states count as begun; None if the op cannot do it."""
        dtype, shape, mask = hidden_states.dtype, hidden_states.shape, ordinary(attention_mask)
        if dtype not in _DTYPES or len(shape) != 3 or not hidden_states.numel():
            return None
        if mask is not None and mask.shape != shape[:2]:
            return None
        sizes = self._mixer.sizes(self)
        states = sizes.zeros(shape[0], dtype)
        if cache is not None:
            states = _states().states_of(cache, self.layer_idx, sizes, shape[0], dtype)
        return (
            None if states is None else MixerCall(None if mask is None else mask.bool().contiguous(), states)
        )

    def reference_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reference | None:
        return reference_call(self, self, dict(zip(self._names, args, strict=False)) | kwargs)

    def forget_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forget_call(self, dict(zip(self._names, args, strict=False)) | kwargs)


@dataclass(frozen=True)
class MixerCall:
    """What a mixer is given besides hidden states.

    Attributes:
        tokens: bool [B, L], or None if all count.
        states: written in place.
    """

    tokens: Tensor | None
    states: States

    def masked(self, hidden_states: Tensor) -> Tensor:
        """With 0 in the place of padding."""
        return hidden_states if self.tokens is None else hidden_states * self.tokens[..., None]


def is_fused(module: FusedModuleMixin, named: dict[str, Any]) -> bool:
    """Whether a call with these arguments is not to take the own forward."""
    return (
        not any(name in named and named[name] is not None for name in _REFUSED)
        and not module.has_user_hooks
        and not torch.compiler.is_compiling()
    )


def reference_call(module: FusedModuleMixin, mixer: Any, named: dict[str, Any]) -> Reference | None:
    """The call without its cache, if nothing is in that: else it goes on from states that the fused call is about to change."""
    cache, mask = named.get("cache"), named.get("attention_mask")
    if not is_fused(module, named) or (
        cache is not None and cache.get_conv_state(mixer.layer_idx) is not None
    ):
        return None
    return Reference((), {**named, "cache": None}, None if mask is None else mask.bool())


def forget_call(mixer: Any, named: dict[str, Any]) -> None:
    if named.get("cache") is not None:
        named["cache"].layers[mixer.layer_idx].reset()


def ordinary(tensor: Any) -> Any:
    return tensor.tensor if isinstance(tensor, LazyTensor) else tensor


@once
def _states() -> Any:
    from hf_cpu_accel.generate import recurrent_states

    return recurrent_states
