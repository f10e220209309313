"""`FusedMixer`: the module that mixes the tokens of a layer, attention or a recurrence, fused between packed projections."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.hosts.arguments import CACHES, STATES, of_own_keys, with_its_cache_name, with_our_cache_name
from hf_cpu_accel.lazy.lazy_tensor import ordinary
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, Reference
from hf_cpu_accel.rewrite.core.packed_module import PackedModule
from hf_cpu_accel.rewrite.linear.layer import PackedLinear

# Arguments of hosts with the ends of concatenated sequences.
_PACKED = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
_ADDED = (
    "transformer_hidden_states"  # which layers of Zamba 2 add to their input, except in the list of layers
)
_REFUSED = (*_PACKED, _ADDED, STATES, *(name for name in CACHES if name != "cache"))


_POSITIONS = 70_000  # the first in an example, large enough that Llama 4's factor is not 1

Projection = Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True)
class Example:
    """Arguments of a left-padded prompt, and of the token after it, besides hidden states.

    Attributes:
        tokens: bool [batch, tokens of the prompt], False at padding.
        prompt, token: both with the same cache, which is empty.
    """

    tokens: Tensor
    prompt: dict[str, Any]
    token: dict[str, Any]


def attending_example(batch: int, tokens: int, padding: int, tables: Callable[[int, int], Any]) -> Example:
    """Return the example for attention with a KV cache.

    Args:
        tables: returns those of `count` positions from `first` on, in the form of the host.
    """
    from transformers import DynamicCache

    seen = torch.ones(batch, tokens, dtype=torch.bool)
    seen[0, :padding] = False
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    all_seen = torch.cat((seen, torch.ones(batch, 1, dtype=torch.bool)), dim=1)
    cache = DynamicCache()

    def arguments_of(first: int, count: int, mask: Tensor) -> dict[str, Any]:
        positions = torch.arange(first, first + count)[None] + _POSITIONS
        embedded = tables(first, count)
        return {
            "attention_mask": mask,
            "position_embeddings": embedded,
            "position_ids": positions,
            "cache": cache,
        }

    prompt = arguments_of(0, tokens, causal & seen[:, None, None])
    return Example(seen, prompt, arguments_of(tokens, 1, all_seen[:, None, None]))


class FusedMixer(FusedModuleMixin):
    """Mixed into the mixer's own class: [B, L, C] -> [B, L, C].

    Its class's own forward runs where hooks read values inside, while a graph is traced, and for packed sequences.

    Attributes:
        last: the name of its last linear.
    """

    last = ""
    layer_idx: int
    _names: tuple[str, ...]  # of the parameters of its forward
    _projections: list[Projection] | None = None

    @property
    @abstractmethod
    def first(self) -> tuple[str, ...]:
        """Return the names of the input projections."""

    @abstractmethod
    def mix(self, hidden_states: Tensor, named: dict[str, Any]) -> Tensor | None:
        """Compute [B, L, C] -> [B, L, features], the input of the last linear. Return None, without changing anything, for a
        call that the ops do not support.

        Args:
            named: the other arguments of the mixer, or of its layer.
        """

    @abstractmethod
    def example(self, batch: int, tokens: int, padding: int) -> Example:
        """Return an example in which the first `padding` tokens of the first sequence are padding."""

    @abstractmethod
    def is_empty(self, cache: Any) -> bool:
        """Return whether its layer of the cache is empty."""

    def project(self, hidden_states: Tensor) -> list[Tensor]:
        """Return the outputs of the linears `first` for [B, L, C]; adjacent ones in one product."""
        if self._projections is None:
            self._projections = _projections_of(self, self.first)
        return [output for project in self._projections for output in project(hidden_states)]

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, and the cache as `cache`."""
        named = kwargs if not args else dict(zip(self._names, args, strict=False)) | kwargs
        return with_our_cache_name(self._names, named)

    def reference_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reference | None:
        return reference_call(self, self, self.named(args, kwargs))

    def _apply(self, fn: Any, recurse: bool = True) -> FusedMixer:
        super()._apply(fn, recurse)
        self._projections = None  # they hold copies of biases
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_projections": None}


def is_fused(module: FusedModuleMixin, named: dict[str, Any]) -> bool:
    """Return whether a call with these arguments runs fused."""
    cache = named.get("cache")
    return (
        not any(name in named and named[name] is not None for name in _REFUSED)
        and (cache is None or hasattr(cache, "layers"))  # not of an encoder and a decoder
        and not module.is_watched
        and not torch.compiler.is_compiling()
    )


def reference_call(module: Any, mixer: FusedMixer, named: dict[str, Any]) -> Reference | None:
    """Return the call without its cache if that is empty, or None: otherwise it would continue from states that the fused call
    changes."""
    cache = named.get("cache")
    if not is_fused(module, named) or (cache is not None and not mixer.is_empty(cache)):
        return None
    kept = None if cache is None else _storage_dtype(cache, mixer.layer_idx)
    own = of_own_keys({**named, "cache": None}, named["hidden_states"].shape[1])
    own = with_its_cache_name(module._names, own)
    caches = () if cache is None else ((cache, mixer.layer_idx),)
    return Reference((), own, tokens_of(own.get("attention_mask")), dtype=kept, caches=caches)


def _storage_dtype(cache: Any, index: int) -> str | None:
    """Return the dtype in which `cache` was asked to store keys and values, or None."""
    dtype = getattr(cache.layers[index], "storage_dtype", None) if index < len(cache.layers) else None
    return None if dtype is None else str(dtype).removeprefix("torch.")


def tokens_of(mask: Any) -> Tensor | None:
    """Return bool [B, L], the tokens of a mask [B, L], or the queries that attend to some key in a mask [B, heads, L, keys];
    None for all."""
    mask = ordinary(mask)
    if mask is None or mask.dim() == 2:
        return None if mask is None else mask.bool()
    seen = mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return seen.any(3).any(1)


def holds_weights(module: nn.Module) -> bool:
    """Return whether the module has weights, packed or not."""
    packed = any(isinstance(part, PackedModule) for part in module.modules())
    return packed or any(True for _ in module.parameters())


def _projections_of(module: Any, names: tuple[str, ...]) -> list[Projection]:
    """Return functions that compute the outputs of one linear or more, in the order of the names."""
    linears: list[Any] = [module._modules[name] for name in names]
    runs: list[list[Any]] = []
    for linear in linears:
        last: Any = runs[-1][-1] if runs else None
        if _are_packed(linear, last) and linear.group is last.group and linear.index == last.index + 1:
            runs[-1].append(linear)
        else:
            runs.append([linear])
    return [_run(run) for run in runs]


def _are_packed(*linears: Any) -> bool:
    return all(isinstance(linear, PackedLinear) for linear in linears)


def _run(linears: list[Any]) -> Projection:
    first, last = linears[0], linears[-1]
    if len(linears) == 1:
        alone = first.group.route(first.index, first.index) if isinstance(first, PackedLinear) else first
        return lambda input: [alone(input)]
    together: Projection = first.group.route(first.index, last.index)
    return together
