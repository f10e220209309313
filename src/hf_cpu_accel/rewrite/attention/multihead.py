"""`PackedMultiheadAttention`, the replacement of an `nn.MultiheadAttention`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.lazy.lazy_weight import LazyWeight
from hf_cpu_accel.lazy.remember import remember
from hf_cpu_accel.packing.saved_weight import SavedWeight
from hf_cpu_accel.patching.accelerated_module import SavedParameter
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, Reference
from hf_cpu_accel.rewrite.attention.processor import AttentionConfig, dot_product_attention
from hf_cpu_accel.rewrite.core.packed_module import changed_dtype, check_inference, loading_refused
from hf_cpu_accel.rewrite.linear.layer import unpack_weight
from hf_cpu_accel.rewrite.linear.projection_group import ProjectionGroup
from hf_cpu_accel.runtime.tracing import is_tracing

WEIGHT, BIAS = "in_proj_weight", "in_proj_bias"
_QUERY, _KEY, _VALUE = range(3)
_ARGUMENTS = (
    *("query", "key", "value", "key_padding_mask", "need_weights"),
    *("attn_mask", "average_attn_weights", "is_causal"),
)


class _Projection(LazyWeight):
    """A tensor subclass that makes torch's encoder layers call their parts instead of reading their weights."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class PackedMultiheadAttention(FusedModuleMixin):
    """Mixed into the class of the original; it has its attributes, its bias and its `out_proj`, which is packed as well.

    query [B, L, E], key and value [B, S, E], or in the layout of `batch_first=False` and unbatched inputs -> output as the
    query, and weights [B, L, S] averaged over the heads, [B, heads, L, S], or None.

    As in `PackedLinear` the packed weight is neither parameter nor buffer: under its name `state_dict()` and the attribute have
    dequantized values.

    Attributes:
        group: the weight of queries, keys and values as three members.
        config: the settings of attention.
        weight_dtype: dtype of the weight for other code; follows `model.to(dtype)`.
        kept: the original weight, with `originals="memory"`. It is no parameter: torch's encoder layers would read it instead of
            calling this module.
        rule: the name of the rule that created it.
    """

    copies_parameters = True
    group: ProjectionGroup
    config: AttentionConfig
    weight_dtype: torch.dtype
    kept: nn.Parameter | None = None
    rule: str = ""
    is_of_linears: bool = False
    _values: dict[torch.dtype, Tensor]

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        if not self._takes(given):
            try:
                output: tuple[Tensor, Tensor | None] = self._original_class.forward(self, *args, **kwargs)
                return output
            finally:
                self._values = {}  # unpacked values of one layer, which must not accumulate over the layers
        check_inference(self, given["query"])
        return self._attend(given)

    def reference_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reference | None:
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        return Reference(args, kwargs) if self._takes(given) else None

    def _takes(self, given: dict[str, Any]) -> bool:
        states = [given.get(name) for name in _ARGUMENTS[:3]]
        if self.is_watched or is_tracing():
            return False
        query, key, value = states
        if not all(isinstance(part, Tensor) and not part.is_nested for part in states):
            return False
        assert query is not None
        assert key is not None
        assert value is not None
        return (
            query.dim() in (2, 3)
            and query.dim() == key.dim() == value.dim()
            and query.dtype in (torch.float32, torch.bfloat16)
            and query.dtype is key.dtype is value.dtype
            and key.shape == value.shape
            and query.shape[-1] == key.shape[-1] == self._embed_dim
            and (given.get("attn_mask") is not None or not given.get("is_causal", False))
            and self._masks_fit(given, query, key)
            and not torch.is_autocast_enabled("cpu")
        )

    def _masks_fit(self, given: dict[str, Any], query: Tensor, key: Tensor) -> bool:
        """Return whether masks have shapes and dtypes that torch supports; otherwise torch raises the error."""
        tokens = 1 if query.dim() == 3 and self.batch_first else 0
        q_len, kv_len = query.shape[tokens], key.shape[tokens]
        batch = query.shape[1 - tokens] if query.dim() == 3 else 1
        if query.dim() == 3 and key.shape[1 - tokens] != batch:
            return False
        heads: Any = self.num_heads
        shapes = {
            "attn_mask": ((q_len, kv_len), (batch * heads, q_len, kv_len)),
            "key_padding_mask": ((batch, kv_len) if query.dim() == 3 else (kv_len,),),
        }
        masks = [(given.get(name), known) for name, known in shapes.items()]
        return all(
            mask is None or (mask.shape in known and (mask.dtype is torch.bool or mask.is_floating_point()))
            for mask, known in masks
        )

    @property
    def _embed_dim(self) -> int:
        return self.group.packed.in_features

    def _attend(self, given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        single = given["query"].dim() == 2
        turned = not single and not self.batch_first
        query, key, value = self._projected([given[name] for name in _ARGUMENTS[:3]], single, turned)
        mask = self._mask(given.get("attn_mask"), given.get("key_padding_mask"), query, key.shape[2])
        weights = None
        if given.get("need_weights", True):
            weights = _weights(query, key, mask)
            context = weights @ value
            if given.get("average_attn_weights", True):
                weights = weights.mean(dim=1)
        else:
            context = dot_product_attention(query, key, value, mask, config=self.config)
        batch, heads, length, size = context.shape
        output = self.out_proj(context.transpose(1, 2).reshape(batch, length, heads * size))
        if single:
            return output[0], None if weights is None else weights[0]
        return output.transpose(0, 1) if turned else output, weights

    def _projected(self, states: list[Tensor], single: bool, turned: bool) -> list[Tensor]:
        """Return queries, keys and values [B, heads, tokens, head_dim]; those of one tensor in one product."""
        query, key, value = states
        if query is key and key is value:
            made = self._run(_QUERY, _VALUE, query, single, turned)
        elif key is value:
            made = [
                *self._run(_QUERY, _QUERY, query, single, turned),
                *self._run(_KEY, _VALUE, key, single, turned),
            ]
        else:
            made = [
                part
                for number, state in enumerate(states)
                for part in self._run(number, number, state, single, turned)
            ]
        heads: Any = self.num_heads
        return [part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in made]

    def _run(self, first: int, last: int, states: Tensor, single: bool, turned: bool) -> list[Tensor]:
        """Return the members' outputs, [B, tokens, E] each."""
        states = states[None] if single else states.transpose(0, 1) if turned else states
        output = self.group.route(first, last)(states)
        return [output] if first == last else list(output)

    def _mask(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor, kv_len: int
    ) -> Tensor | None:
        """Return the mask of keys for attention: True for visible ones, or numbers to add."""
        batch, heads, q_len, _ = query.shape
        parts = []
        if attn_mask is not None:
            shape = (1, 1) if attn_mask.dim() == 2 else (batch, heads)
            parts.append(_visible_keys(attn_mask, query.dtype).view(*shape, q_len, kv_len))
        if key_padding_mask is not None:
            parts.append(_visible_keys(key_padding_mask, query.dtype).view(batch, 1, 1, kv_len))
        if len(parts) < 2:
            return parts[0] if parts else None
        one, other = parts
        if one.dtype is other.dtype is torch.bool:
            return one & other
        return _additive_mask(one, query.dtype) + _additive_mask(other, query.dtype)

    def unpack(self) -> Tensor:
        """Return the weight [3 * E, E]: the original if it is kept, else dequantized."""
        if self.kept is not None:
            return self.kept.detach().to(self.weight_dtype)
        return unpack_weight(self.group.packed, self.group.permutation, self.weight_dtype)

    def __getattr__(self, name: str) -> Any:
        if name != WEIGHT:
            return super().__getattr__(name)
        return self._weight(self._values)

    def whole_parameters(self) -> dict[str, Tensor | None]:
        """Return the parameters under their original names; a packed one is a `LazyWeight`, which stores no values."""
        return {WEIGHT: self._weight({}) if self.kept is None else self.kept, **self._parameters}

    def _weight(self, memo: dict[torch.dtype, Tensor]) -> LazyWeight:
        packed = self.group.packed
        return _Projection((packed.out_features, packed.in_features), self.weight_dtype, self.unpack, memo)

    def saved_parameters(self) -> Iterator[SavedParameter]:
        yield SavedParameter(WEIGHT, self._saved_weight, group=self)

    def _saved_weight(self, paths: tuple[str, ...]) -> SavedWeight:
        return SavedWeight(self.rule, paths, self.group.packed, permutation=self.group.permutation)

    def kept_parameters(self) -> Mapping[str, Tensor | None]:
        return self._parameters if self.kept is None else {WEIGHT: self.kept, **self._parameters}

    def parameter_place(self) -> tuple[nn.Module, str]:
        """Return the module and the name of the parameter whose values it holds; see `patching.restore.Packed`."""
        return self, WEIGHT

    def extra_repr(self) -> str:
        return f"embed_dim={self._embed_dim}, num_heads={self.num_heads}, packed={self.group.packed.dtype}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedMultiheadAttention:
        self.weight_dtype = changed_dtype(self.weight_dtype, fn)
        super()._apply(fn, recurse)
        self._values = {}
        for index, bias in enumerate(biases_of(self._parameters[BIAS])):
            self.group.take_bias(index, bias)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_values": {}}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + WEIGHT] = self.unpack()  # before the bias, as in the original
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise loading_refused()


def biases_of(bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the biases of queries, keys and values, as views."""
    return (None, None, None) if bias is None else bias.detach().chunk(3)


def _weights(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Return softmax(query . key / sqrt(head_dim)) [B, heads, L, S]."""
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    return (scores if mask is None else scores + _additive_mask(mask, scores.dtype)).softmax(dim=-1)


def _visible_keys(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask inverted: torch's masks of this module are True for hidden keys."""
    if mask.dtype is torch.bool:
        return remember(mask, "seen", lambda: ~mask)
    return mask if mask.dtype is dtype else mask.to(dtype)


def _additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask

    def added() -> Tensor:
        return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))

    return remember(mask, ("added", dtype), added)
