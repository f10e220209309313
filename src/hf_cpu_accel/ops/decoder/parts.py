"""The parts of a decoder layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from hf_cpu_accel.ops.experts import ExpertWeights
from hf_cpu_accel.packing.linear import PackedWeight


@dataclass(frozen=True)
class Projection:
    """A projection input @ weight^T + bias; bias is [out_features] or None."""

    weight: PackedWeight
    bias: Tensor | None


@dataclass(frozen=True)
class Norm:
    """A norm over the last dimension, as in ops/norm.py; an offset of the weight (Gemma's 1 + weight) is already added.

    Attributes:
        weight, bias: [features] float32 or bfloat16, or None for ones and zeros; rms_norm has no bias. For query and key see
            `SelfAttention`.
    """

    kind: Literal["rms_norm", "layer_norm"]
    weight: Tensor | None
    bias: Tensor | None
    eps: float


@dataclass(frozen=True)
class Heads:
    """The positions of the heads of the query (or key, value, gate) in the output features of the qkv projection.

    With group = heads // kv_heads, head h of a query or a gate starts at first + (h // group) * group_stride + (h % group) *
    head_stride, and head j of a key or value at first + j * group_stride. head_stride is ignored if group is 1.
    """

    first: int
    group_stride: int
    head_stride: int = 0


@dataclass(frozen=True)
class Gate:
    """activation(gate), a factor of the attention output (Qiu et al. 2025, arXiv:2505.06708).

    Attributes:
        heads: its position in the features of the qkv projection.
        dim: 1 for a factor per head, or value_dim.
        activation: one of `abi.GATE_ACTIVATIONS` except "none".
    """

    heads: Heads
    dim: int
    activation: Literal["sigmoid", "softplus"]


@dataclass(frozen=True)
class SelfAttention:
    """softmax(scale * query key^T) value over the cache, with D = head_dim and Dv = value_dim.

    Attributes:
        qkv: at least (heads + kv_heads) * D + kv_heads * Dv x C, packed; query, key and value are the positions of the heads in it.
        window: the number of keys that a query sees, including its own; None for all.
        softcap: replace scores by softcap * tanh(scores / softcap) (Gemma 2, arXiv:2408.00118); None for no cap.
        sinks: [heads], an additional score per head in the softmax, without a value (gpt-oss); or None.
        alibi: [heads], subtracted from scores per token of distance (Press et al. 2022, arXiv:2108.12409); or None.
        relative: [heads, distances], added to scores by the distance of the key before the query, at most the last distance (T5,
            Raffel et al. 2020, arXiv:1910.10683, section 2.1); or None.
        rotary_dim: the number of rotated features of a head, from the first on; 0 for none. Su et al. 2021, arXiv:2104.09864.
        rotary_interleaved: pairs are features (2i, 2i + 1), as in GPT-J; otherwise (i, i + rotary_dim / 2), as in Llama.
        rotary: the index of the table in the call.
        query_norm, key_norm: before the rotation. Weights [D]: over each head, with the same weights; [heads, D]: over each head,
            with its own weights; [heads * D] (for keys kv_heads): over all heads together (OLMo 2, arXiv:2501.00656). None: over
            each head.
        value_norm: the norm of values before they are cached; weights as in key_norm, with Dv instead of D (Gemma 4).
        sub_norm: the norm of the input of `output`, before the gate (sub-LayerNorm, arXiv:2210.06423: BitNet, Kosmos); weights as
            in query_norm, with Dv instead of D.
        gate: the gate, or None.
        output: C x heads * Dv, packed.
        shares_keys: the layer gets the cache of an earlier layer, which already has the keys and values of the call. It has no own
            keys and values; `key`, `value` and their norms are ignored (Gemma 3n, Gemma 4).
    """

    qkv: Projection
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    query: Heads
    key: Heads
    value: Heads
    scale: float
    output: Projection
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi: Tensor | None = None
    relative: Tensor | None = None
    rotary_dim: int = 0
    rotary_interleaved: bool = False
    rotary: int = 0
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    value_norm: Norm | None = None
    sub_norm: Norm | None = None
    gate: Gate | None = None
    shares_keys: bool = False


@dataclass(frozen=True)
class Recurrence:
    """An op of `ops/recurrent` on the outputs of two projections: `qkv` of the layer's attention, and `rest`.

    `output` of the attention is the last projection; its other attributes are ignored. The states replace keys and values:
    conv_state [B, channels, taps], and state [B, heads, D, E], for a state space [B, heads, E, D], for a short convolution
    anything.

    Attributes:
        op: the name of the op.
        rest: a second projection of the hidden states, whose features follow those of `qkv`; or None.
        conv_input, conv_gate, gate, decay, beta: the first feature of each; conv_gate multiplies the input of a short convolution,
            decay is dt of a state space.
        conv_weight: [channels, 1, taps]; conv_bias: [channels] or None.
        heads, key_heads, key_dim, value_dim: H, the heads of queries and keys (for a state space, groups of B and C), D and E. For
            a selective scan only key_dim, the features of its state [B, channels, D].
        A_log, dt_bias, D: [heads], or for a selective scan [channels, D], None and [channels]; None if the op has no such argument.
        norm_weight: an argument of the op.
        selected, steps: for a selective scan, the projection of the convolution's output to dt, B and C, and the projection of this
            dt to that of the op.
        dt_norm, B_norm, C_norm: the weights of RMS norms of the outputs of `selected`, all with `norm_eps`; or None.
    """

    op: Literal["short_convolution", "gated_delta_net", "state_space", "selective_scan"]
    conv_weight: Tensor
    conv_bias: Tensor | None
    conv_input: int
    gate: int
    rest: Projection | None = None
    conv_gate: int = 0
    decay: int = 0
    beta: int = 0
    heads: int = 0
    key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    D: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_eps: float = 0.0
    norm_groups: int = 1
    gate_first: bool = False
    selected: Projection | None = None
    steps: Projection | None = None
    dt_norm: Tensor | None = None
    B_norm: Tensor | None = None
    C_norm: Tensor | None = None


@dataclass(frozen=True)
class CrossAttention:
    """softmax(scale * query key^T) value over the constant keys and values of an encoder's output.

    Attributes:
        query: heads * D x C, packed, one head after another.
        output: C x heads * Dv, packed.
    """

    query: Projection
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    output: Projection


@dataclass(frozen=True)
class FeedForward:
    """down(norm(activation(up(x)))); gated: down(norm(activation(gate(x)) * up(x))) (Shazeer 2020, arXiv:2002.05202).

    Attributes:
        up: I x C, packed; gated: 2I x C, the features of the gate first, I a multiple of 32.
        activation: one of `ops.linear.ACTIVATIONS`.
        down: C x I, packed.
        sub_norm: the norm of I features (sub-LayerNorm, arXiv:2210.06423), or None, as in a shared expert.
    """

    up: Projection
    gated: bool
    activation: str
    down: Projection
    sub_norm: Norm | None = None


@dataclass(frozen=True)
class MixtureOfExperts:
    """The sum of weight * expert(x) over the experts of a token, plus shared(x), an expert for all tokens.

    A token is routed to the `top_k` experts with the highest score + choice_bias. The weight of an expert is its score, divided by
    the sum over the selected ones if `renormalize`, times `scale`. Softmax: Fedus et al. 2022, arXiv:2101.03961; sigmoid with a
    bias for the selection: DeepSeek-V3, arXiv:2412.19437.

    Attributes:
        router: E x C, packed; E + 1 with `shared_gate`, whose output is the last.
        scoring: the function from the router's E outputs to scores.
        choice_bias: [E] or None.
        shared: the shared expert, or None.
        shared_gate: whether shared(x) is multiplied by the sigmoid of the gate (Qwen2-MoE).
    """

    router: Projection
    experts: ExpertWeights
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    choice_bias: Tensor | None = None
    renormalize: bool = False
    scale: float = 1.0
    shared: FeedForward | None = None
    shared_gate: bool = False


@dataclass(frozen=True)
class PerLayerInput:
    """output(activation(gate(x)) * input), with an input of the call per token and layer (Gemma 3n, Gemma 4).

    Attributes:
        gate: I x C, packed.
        activation: one of `ops.linear.ACTIVATIONS`.
        output: C x I, packed.
        post_norm: the norm of the branch's output, before the residual is added; or None.
    """

    gate: Projection
    activation: str
    output: Projection
    post_norm: Norm | None = None


@dataclass(frozen=True)
class DecoderLayer:
    """A decoder layer: x = x + attention(x), then x + cross(x) in encoder-decoders, then x + ffn(x), with optional norms.

    Attributes:
        attention: self-attention.
        ffn: the FFN or mixture of experts; None for a layer without (Nemotron-H).
        cross: cross-attention, or None without an encoder; cross_norm is before it, cross_out_norm after the residual is added.
        attention_norm, ffn_norm: of the branch's input.
        attention_post_norm, ffn_post_norm: of the branch's output, before the residual is added (Gemma 2, OLMo 2).
        attention_out_norm, ffn_out_norm: after the residual is added (post-LN: the first GPT, OPT-350m).
        parallel: x + attention(attention_norm(x)) + ffn(ffn_norm(x)) (GPT-J, NeoX, Falcon, Phi, Cohere).
        residual_scale: factor of both branches (Granite, MiniCPM).
        per_layer: another branch after the FFN, or None.
        output_scale: factor of the layer's output, including the residual (Gemma 4).
        recurrence: the op that replaces `attention` between its projections, or None.
    """

    attention: SelfAttention
    ffn: FeedForward | MixtureOfExperts | None
    attention_norm: Norm | None = None
    ffn_norm: Norm | None = None
    attention_post_norm: Norm | None = None
    ffn_post_norm: Norm | None = None
    attention_out_norm: Norm | None = None
    ffn_out_norm: Norm | None = None
    parallel: bool = False
    residual_scale: float = 1.0
    cross: CrossAttention | None = None
    cross_norm: Norm | None = None
    cross_out_norm: Norm | None = None
    per_layer: PerLayerInput | None = None
    output_scale: float = 1.0
    recurrence: Recurrence | None = None
