"""What a decoder layer is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from hf_cpu_accel.ops.experts import ExpertWeights
from hf_cpu_accel.packing.linear import PackedWeight


@dataclass(frozen=True)
class Projection:
    """input @ weight^T + bias; bias [out_features] or None."""

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
    """Where the heads of the query (or key, value, gate) lie among the output features of the qkv projection.

    Head h of a query or a gate begins at first + (h // group) * group_stride + (h % group) * head_stride with
    group = heads // kv_heads, key or value head j at first + j * group_stride. head_stride says nothing where group is 1.
    """

    first: int
    group_stride: int
    head_stride: int = 0


@dataclass(frozen=True)
class Gate:
    """activation(gate), by which attention's output is multiplied (Qiu et al. 2025, arXiv:2505.06708).

    Attributes:
        heads: where among the features of the qkv projection it lies.
        dim: 1, a factor for each head, or as many features as a value has.
        activation: one of `bind.GATES` but "none".
    """

    heads: Heads
    dim: int
    activation: Literal["sigmoid", "softplus"]


@dataclass(frozen=True)
class SelfAttention:
    """softmax(scale * query key^T) value over the cache, with D = head_dim and Dv = value_dim.

    Attributes:
        qkv: at least (heads + kv_heads) * D + kv_heads * Dv x C, packed; query, key, value say where in it the heads are.
        window: how many keys a query sees, its own among them; None for all.
        softcap: scores become softcap * tanh(scores / softcap) (Gemma 2, arXiv:2408.00118); None for no cap.
        sinks: [heads], a further score per head that takes part in the softmax and has no value (gpt-oss); or None.
        alibi: [heads], what a score loses per token of distance (Press et al. 2022, arXiv:2108.12409); or None.
        relative: [heads, distances], what a score gains if the key is so many tokens before the query; beyond the last of them it
            stays the same (T5, Raffel et al. 2020, arXiv:1910.10683, section 2.1); or None.
        rotary_dim: how many features of a head are rotated, from the first on; 0 for none. Su et al. 2021, arXiv:2104.09864.
        rotary_interleaved: pairs are features (2i, 2i + 1), as in GPT-J; otherwise (i, i + rotary_dim / 2), as in Llama.
        rotary: which of the call's tables.
        query_norm, key_norm: before the rotation. Weights [D]: over each head, with the same weights; [heads, D]: over each head,
            with its own; [heads * D] (for keys kv_heads): over all heads together (OLMo 2, arXiv:2501.00656). None: over each head.
        value_norm: likewise, of what goes into the cache; its weights as those of key_norm, with Dv for D (Gemma 4).
        sub_norm: of what goes into `output`, before the gate (sub-LayerNorm, arXiv:2210.06423: BitNet, Kosmos); its weights as
            those of query_norm, with Dv for D.
        gate: or None.
        output: C x heads * Dv, packed.
        shares_keys: the layer is handed the cache of an earlier one, which has the call's keys and values in it already: it has
            none of its own, and `key`, `value` and their norms say nothing (Gemma 3n, Gemma 4).
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
    """One of the ops of `ops/recurrent`, over what two projections give: the `qkv` of the layer's attention, whose `output` is its
    last projection and which says nothing else then, and `rest`. Its states stand for keys and values: conv_state
    [B, channels, taps] and state [B, heads, D, E], of a state space [B, heads, E, D], of a short convolution anything.

    Attributes:
        op: its name.
        rest: of the hidden states, too; its features are counted on behind those of `qkv`. None for none.
        conv_input, conv_gate, gate, decay, beta: the features at which these begin; conv_gate is what a short convolution
            multiplies its input with, decay a state space's dt.
        conv_weight: [channels, 1, taps]; conv_bias: [channels] or None.
        heads, key_heads, key_dim, value_dim: H, those of queries and keys (of a state space, groups of B and C), D and E. Of a
            selective scan only key_dim, the features of its state [B, channels, D].
        A_log, dt_bias, D: [heads] or, of a selective scan, [channels, D], None and [channels]; or None where the op takes none.
        norm_weight: as the op takes it.
        selected, steps: of a selective scan, what makes dt, B and C of what comes out of the convolution, and the dt that the op is
            given of that one.
        dt_norm, B_norm, C_norm: the weights of RMS norms of what `selected` gives, all with `norm_eps`; or None for none.
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
    """softmax(scale * query key^T) value over keys and values of an encoder's output, which no call changes.

    Attributes:
        query: heads * D x C, packed, head after head.
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
        up: I x C, packed; gated: 2I x C, the gate's features first, I a multiple of 32.
        activation: one of `ops.linear.ACTIVATIONS`.
        down: C x I, packed.
        sub_norm: the norm, of I features (sub-LayerNorm, arXiv:2210.06423); None for none, as in a shared expert.
    """

    up: Projection
    gated: bool
    activation: str
    down: Projection
    sub_norm: Norm | None = None


@dataclass(frozen=True)
class MixtureOfExperts:
    """Sum of weight * expert(x) over the experts of a token, and of shared(x), an expert that all tokens go to.

    A token goes to the `top_k` experts with the highest score + choice_bias. The weight of an expert is its score, divided by the
    sum over the chosen ones if `renormalize`, times `scale`. Softmax: Fedus et al. 2022, arXiv:2101.03961; sigmoid with a bias for
    the choice: DeepSeek-V3, arXiv:2412.19437.

    Attributes:
        router: E x C, packed; E + 1 with `shared_gate`, whose output is the last.
        scoring: what makes scores of the router's E outputs.
        choice_bias: [E] or None.
        shared: or None.
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
    """output(activation(gate(x)) * input), where the call has an input for each token and layer (Gemma 3n, Gemma 4).

    Attributes:
        gate: I x C, packed.
        activation: one of `ops.linear.ACTIVATIONS`.
        output: C x I, packed.
        post_norm: of the branch's output, before the residual is added; or None.
    """

    gate: Projection
    activation: str
    output: Projection
    post_norm: Norm | None = None


@dataclass(frozen=True)
class DecoderLayer:
    """x = x + attention(x), in decoders of encoder-decoders x + cross(x), then x + ffn(x), with norms wherever a family has them.

    Attributes:
        ffn: None where a layer is nothing but attention (Nemotron-H).
        cross: None where there is no encoder; with its norms before it and after the residual is added.
        attention_norm, ffn_norm: of the branch's input.
        attention_post_norm, ffn_post_norm: of the branch's output, before the residual is added (Gemma 2, OLMo 2).
        attention_out_norm, ffn_out_norm: after the residual is added (post-LN: the first GPT, OPT-350m).
        parallel: x + attention(attention_norm(x)) + ffn(ffn_norm(x)) (GPT-J, NeoX, Falcon, Phi, Cohere).
        residual_scale: factor of both branches (Granite, MiniCPM).
        per_layer: a further branch behind the FFN, or None.
        output_scale: factor of the layer's output, residual and all (Gemma 4).
        recurrence: what takes the place of `attention` between its projections, which alone count then; or None.
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
