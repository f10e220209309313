"""`FusedMixer`: a mixer with recurrence whose convolution, recurrence and norm are one op, between its packed projections."""

from __future__ import annotations

from functools import cache as once
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, Reference
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.recurrent.parts import Mixer

# By which hosts tell where one of several sequences in a row ends.
_PACKED = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
_OLD_CACHES = ("cache_params", "past_key_values", "past_key_value")
_DTYPES = (torch.float32, torch.bfloat16)


class FusedMixer(FusedModuleMixin):
    """Mixed into the mixer's own class: [B, L, C] -> [B, L, C].

    It computes its class's own forward where hooks look inside, while a graph is traced, for packed sequences, and with a cache whose
    states the op cannot write (one that records the past in order to be cropped).
    """

    _mixer: Mixer
    _names: tuple[str, ...]  # of the parameters of its forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        named = kwargs if not args else dict(zip(self._names, args, strict=False)) | kwargs
        output = self._fused(**named) if self._is_fused(named) else None
        return self._original_class.forward(self, *args, **kwargs) if output is None else output

    def _is_fused(self, named: dict[str, Any]) -> bool:
        return (
            not any(named.get(name) is not None for name in (*_PACKED, *_OLD_CACHES))
            and not self.has_user_hooks
            and not torch.compiler.is_compiling()
        )

    def _fused(
        self, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None, **_: Any
    ) -> Tensor | None:
        check_inference(self, hidden_states)
        hidden_states, mask = _ordinary(hidden_states), _ordinary(attention_mask)
        if hidden_states.dtype not in _DTYPES or hidden_states.dim() != 3 or not hidden_states.numel():
            return None
        tokens = None
        if mask is not None:
            if mask.shape != hidden_states.shape[:2]:
                return None
            tokens = mask.bool().contiguous()
        batch, dtype, sizes = len(hidden_states), hidden_states.dtype, self._mixer.sizes(self)
        index: Any = self.layer_idx
        states = (
            sizes.zeros(batch, dtype)
            if cache is None
            else _states().states_of(cache, index, sizes, batch, dtype)
        )
        if states is None:
            return None
        if tokens is not None:
            hidden_states = hidden_states * tokens[..., None]
        if sizes.state is None:
            states = states[:1]
        return self._mixer.compute(self, hidden_states, tokens, states)

    def reference_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reference | None:
        named = dict(zip(self._names, args, strict=False)) | kwargs
        cache, mask = named.get("cache"), named.get("attention_mask")
        if not self._is_fused(named) or (cache is not None and cache.get_conv_state(self.layer_idx) is not None):
            return None  # it goes on from states that the fused call is about to overwrite
        return Reference((), {**named, "cache": None}, None if mask is None else mask.bool())


def _ordinary(tensor: Any) -> Any:
    return tensor.tensor if isinstance(tensor, LazyTensor) else tensor


@once
def _states() -> Any:
    from hf_cpu_accel.generate import recurrent_states

    return recurrent_states
