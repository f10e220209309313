"""`RecurrentMixer`: a recurrent mixer whose convolution, recurrence and norm are one op, between its packed projections."""

from __future__ import annotations

from functools import cache as once
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.lazy.lazy_tensor import ordinary
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.mixer.mixer import Example, FusedMixer, is_fused
from hf_cpu_accel.rewrite.recurrent.parts import Mixer

_DTYPES = (torch.float32, torch.bfloat16)


class RecurrentMixer(FusedMixer):
    """See `FusedMixer`. With caches whose states the op cannot write, since they record the past for cropping, its own forward
    runs."""

    last = "out_proj"
    _mixer: Mixer

    @property
    def first(self) -> tuple[str, ...]:
        return self._mixer.projections

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        named = self.named(args, kwargs)
        output = self._run_fused(**named) if is_fused(self, named) else None
        return self._original_class.forward(self, *args, **kwargs) if output is None else output

    def _run_fused(self, hidden_states: Tensor, **named: Any) -> Tensor | None:
        check_inference(self, hidden_states)
        mixed = self.mix(ordinary(hidden_states), named)
        return None if mixed is None else self._modules[self.last](mixed)  # type: ignore[misc]

    def mix(self, hidden_states: Tensor, named: dict[str, Any]) -> Tensor | None:
        dtype, shape, mask = hidden_states.dtype, hidden_states.shape, ordinary(named.get("attention_mask"))
        if dtype not in _DTYPES or len(shape) != 3 or not hidden_states.numel():
            return None
        if mask is not None and mask.shape != shape[:2]:
            return None
        mixer, cache = self._mixer, named.get("cache")
        sizes, states = mixer.sizes(self), None
        if cache is not None and shape[1] == 1:
            states = _states().begun_states_of(cache, self.layer_idx, sizes, shape[0])
        if states is not None:
            mixer = mixer.of_step
        elif cache is None:
            states = sizes.zeros(shape[0], dtype)
        else:
            states = _states().states_of(cache, self.layer_idx, sizes, shape[0], dtype)
        if states is None:
            return None
        tokens = None if mask is None else mask.bool().contiguous()
        if tokens is not None:
            hidden_states = hidden_states * tokens[..., None]
        projected = self.project(mixer.scaled(self, hidden_states))
        return mixer.mix(self, projected, tokens, states)

    def is_empty(self, cache: Any) -> bool:
        return cache.get_conv_state(self.layer_idx) is None

    def example(self, batch: int, tokens: int, padding: int) -> Example:
        mask = torch.ones(batch, tokens, dtype=torch.long)
        mask[0, :padding] = 0
        given = {"cache": _states().empty_cache(self.layer_idx + 1)}
        return Example(mask.bool(), {"attention_mask": mask, **given}, {"attention_mask": None, **given})


@once
def _states() -> Any:
    from hf_cpu_accel.generate import recurrent_states

    return recurrent_states
