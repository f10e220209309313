"""encoder_layer, kept_encoder_layer: a whole transformer encoder layer in one call (Vaswani et al. 2017, arXiv:1706.03762).

Six smaller ops compute the same. For 32 tokens of a small model, their dispatch, thread starts and memory traffic take as long as
the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from hf_cpu_accel.abi import NORM_KINDS
from hf_cpu_accel.ops.encoder_layer_reference import INPUTS, SCHEMA, encoder_layer_reference
from hf_cpu_accel.ops.kept import Kept, can_keep
from hf_cpu_accel.ops.linear import check_activation, check_input
from hf_cpu_accel.ops.registry import declare, like_first
from hf_cpu_accel.packing.linear import PackedWeight
from hf_cpu_accel.runtime.tracing import is_tracing


@dataclass(frozen=True)
class NormWeights:
    """The parameters of a norm (ops/norm.py): weight and bias [features] or None (ones, zeros), and eps. rms_norm has no bias."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    kind: Literal["layer_norm", "rms_norm"] = "layer_norm"


@dataclass(frozen=True)
class EncoderWeights:
    """The weights of a layer. H features, A attention features (heads * head_size), I intermediate features.

    Attributes:
        qkv, qkv_bias: 3A x H, packed; query, key and value one after another, A a multiple of 32.
        qkv_order: the indices of query, key and value in `qkv`.
        head_size: the features of a head.
        attention_scale: factor of the attention scores, None for 1 / sqrt(head_size).
        output: H x A; up: I x H; down: H x I, packed.
        gated: up is 2I x H, first the features of the activation, then their factors (Shazeer 2020, arXiv:2002.05202); I is a
            multiple of 32.
        activation: one of `ops.linear.ACTIVATIONS`, after `up`.
        attention_norm: None if nothing is normalized before attention.
        ffn_norm: the norm of the FFN.
        pre_norm: whether the norms come before attention and FFN, or after the residuals are added.
        bf16_intermediates: pass query, key, value, the attention output and the FFN's intermediate in bfloat16. bfloat16 and int8
            weights round them as coarsely anyway. With int8 weights attention multiplies in integers on x86 with AVX2: scores in 8
            bits (12 without VNNI), probabilities and values in 11 to 13.
        attention_layer_scale, ffn_layer_scale: [H], factors of the branches before they are added (LayerScale, Touvron et al. 2021,
            arXiv:2103.17239), or None; with `pre_norm` only.
    """

    qkv: PackedWeight
    qkv_bias: Tensor | None
    qkv_order: tuple[int, int, int]
    head_size: int
    attention_scale: float | None
    output: PackedWeight
    output_bias: Tensor | None
    attention_norm: NormWeights | None
    up: PackedWeight
    up_bias: Tensor | None
    down: PackedWeight
    down_bias: Tensor | None
    activation: str
    ffn_norm: NormWeights
    pre_norm: bool
    bf16_intermediates: bool = False
    gated: bool = False
    attention_layer_scale: Tensor | None = None
    ffn_layer_scale: Tensor | None = None

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments that follow the inputs of a call in the op's schema; `bind` collects them once."""
        first, second = self.attention_norm or NormWeights(None, None, 0.0), self.ffn_norm
        kinds = [NORM_KINDS.index(norm.kind if norm else "none") for norm in (self.attention_norm, second)]
        named = {
            "qkv": self.qkv.data,
            "qkv_scale": self.qkv.scale,
            "qkv_bias": self.qkv_bias,
            "order": list(self.qkv_order),
            "head_size": self.head_size,
            "attention_scale": self.attention_scale,
            "output": self.output.data,
            "output_scale": self.output.scale,
            "output_bias": self.output_bias,
            "attention_norm_weight": first.weight,
            "attention_norm_bias": first.bias,
            "attention_norm_eps": first.eps,
            "up": self.up.data,
            "up_scale": self.up.scale,
            "up_bias": self.up_bias,
            "down": self.down.data,
            "down_scale": self.down.scale,
            "down_bias": self.down_bias,
            "intermediate_features": self.down.in_features,
            "activation": self.activation,
            "ffn_norm_weight": second.weight,
            "ffn_norm_bias": second.bias,
            "ffn_norm_eps": second.eps,
            "attention_features": self.qkv.out_features // 3,
            "norm_before": self.pre_norm,
            "narrow": self.bf16_intermediates,
            "norms": kinds,
            "gated": self.gated,
            "attention_gain": self.attention_layer_scale,
            "ffn_gain": self.ffn_layer_scale,
        }
        return tuple([named[name] for name in _WEIGHT_ARGUMENTS])

    def bind(self) -> BoundEncoderLayer:
        """Return the argument of `bound_encoder_layer`. It reads weights in place; bind again after a weight is replaced."""
        return BoundEncoderLayer(self.arguments())


class RelativePositions(NamedTuple):
    """Relative positions of disentangled attention (He et al. 2021, arXiv:2006.03654, section 3.1).

    The score of tokens q and k gains scale * (query . keys[i] + key . queries[i]) with i = distances[q - k + L - 1].

    Attributes:
        keys, queries: [rows, heads * head_size] float32 or bfloat16; one of them may be None.
        distances: int32 [2L - 1], the row for each distance; with `rows` of `encoder_layer`, L' instead of L.
    """

    keys: Tensor | None
    queries: Tensor | None
    distances: Tensor


class EncoderInputs(NamedTuple):
    """The inputs of a call besides its hidden states, in the order of the op's schema; see `encoder_layer`."""

    padding: Tensor | None = None
    mask: Tensor | None = None
    relative: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    window: int = 0
    position_keys: Tensor | None = None
    position_queries: Tensor | None = None
    position_index: Tensor | None = None


class BoundEncoderLayer:
    """The arguments of a layer, collected and stored in the library once.

    For few tokens, either takes as long as the layer. Copies and pickles are bound again.
    """

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        """
        Args:
            arguments: from `EncoderWeights.arguments`.
        """
        self.arguments = arguments
        self._kept: Kept | None = None

    def keep(self) -> Kept:
        """Return the arguments stored in the library, storing them at the first call that is not traced."""
        kept = self._kept
        if kept is None:
            kept = self._kept = Kept("encoder_layer", *self.arguments)
            _KEPT[kept.number] = self
        return kept

    def __reduce__(self) -> Any:
        return BoundEncoderLayer, (self.arguments,)


_KEPT: WeakValueDictionary[int, BoundEncoderLayer] = WeakValueDictionary()


def bound_encoder_layer(
    hidden_states: Tensor, inputs: EncoderInputs, bound: BoundEncoderLayer, rows: Tensor | None = None
) -> Tensor:
    """Run `encoder_layer` with bound arguments. The op itself checks the shapes.

    Position keys and queries are packed again only if the tensors are not those of the last call, so do not write to them in place
    between calls. The index may be written to.
    """
    output: Tensor
    if not _KEEPS or is_tracing():  # graphs hold the arguments
        output = _OP(hidden_states, *inputs, *bound.arguments, rows)
    else:
        kept = bound.keep()  # referenced until the call ends, since another thread may replace it
        output = _KEPT_OP(hidden_states, *inputs, kept.number, rows)
    return output


def encoder_layer(
    hidden_states: Tensor,
    weights: EncoderWeights,
    *,
    padding: Tensor | None = None,
    mask: Tensor | None = None,
    relative: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    window: int | None = None,
    positions: RelativePositions | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Run a transformer encoder layer.

    With y = norm(x + attention(x)) it computes norm(y + ffn(y)). With `pre_norm` and y = x + attention(norm(x)) it computes
    y + ffn(norm(y)), where both branches may have a layer scale.

    Args:
        hidden_states: [B, L, H] float32 or bfloat16.
        weights: of the layer.
        padding: bool [B, L], True at tokens. Padding before the first and after the last token of a sequence is not computed: its
            hidden states are zeros.
        mask: in addition to `padding`, bool (True = attend) or floating (added), four dimensions, broadcastable to [B, heads, L,
            L].
        relative: float32 [heads, 2n + 1], added to scores by the distance of key and query, at most n tokens: the middle for the
            same token, before it for keys before the query (T5, Raffel et al. 2020, arXiv:1910.10683, section 2.1). Excludes a
            window.
        rotary: tables (cos, sin), each [1 or B, L, rotated features of a head] float32 or bfloat16 as returned by transformers'
            rotary modules, for pairs (i, i + half) of features (Su et al. 2021, arXiv:2104.09864).
        window: the number of tokens before and after itself that a token attends to; None for all.
        positions: disentangled attention; excludes `relative` and a window.
        rows: int32 [sequences, L'], the row of the B * L rows of `hidden_states` of each token; every row once. For sequences whose
            tokens are not consecutive, such as the windows of an image (Swin, Liu et al. 2021, arXiv:2103.14030). `mask` is then
            [M, heads or 1, L', L'], and sequence i has mask i % M. Excludes `padding` and `rotary`.

    Returns:
        [B, L, H] contiguous, dtype of the input. Sums are float32.

    Raises:
        ValueError: the shapes of hidden_states or padding do not fit, or the activation is unknown.
        RuntimeError: the shapes or dtypes of other arguments do not fit, or arguments exclude each other.
    """
    check_input(hidden_states, weights.qkv)
    check_activation(weights.activation)
    if hidden_states.dim() != 3:
        raise ValueError(
            f"hidden_states of shape {tuple(hidden_states.shape)}: must be [batch, length, features]"
        )
    if padding is not None and padding.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"padding of shape {tuple(padding.shape)}: must be {tuple(hidden_states.shape[:2])}, [batch, length]"
        )
    cos, sin = (None, None) if rotary is None else rotary
    inputs = EncoderInputs(padding, mask, relative, cos, sin, window or 0, *(positions or ()))
    return torch.ops.hf_cpu_accel.encoder_layer(hidden_states, *inputs, *weights.arguments(), rows)


def _kept_reference(hidden_states: Tensor, *given: Any) -> Tensor:
    *inputs, number, rows = given if len(given) > len(EncoderInputs._fields) + 1 else (*given, None)
    return encoder_layer_reference(hidden_states, *inputs, *_KEPT[number].arguments, rows)


declare(SCHEMA, fake=like_first, reference=encoder_layer_reference)
declare(
    f"kept_encoder_layer({INPUTS}, int number, Tensor? rows=None) -> Tensor",
    fake=like_first,
    reference=_kept_reference,
)
_OP: Any = torch.ops.hf_cpu_accel.encoder_layer.default
_KEPT_OP: Any = torch.ops.hf_cpu_accel.kept_encoder_layer.default
_KEEPS = can_keep("encoder_layer")
# Between the inputs and `rows`. Looked up here: graphs may be traced while a layer binds its weights.
_WEIGHT_ARGUMENTS = tuple(argument.name for argument in _OP._schema.arguments)[
    1 + len(EncoderInputs._fields) : -1
]
