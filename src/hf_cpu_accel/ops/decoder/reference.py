"""The reference of decoder_layers in PyTorch, step by step, with float32 between the steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cpu_accel.abi import ACTIVATIONS, GATE_ACTIVATIONS, SCORINGS
from hf_cpu_accel.ops.attention import attention_reference
from hf_cpu_accel.ops.decoder.reference_arguments import LayerArguments
from hf_cpu_accel.ops.decoder.reference_recurrence import recurrence_reference
from hf_cpu_accel.ops.experts import experts_reference
from hf_cpu_accel.ops.kv_cache import from_storage, to_storage
from hf_cpu_accel.ops.linear import ACTIVATIONS as FUNCTIONS
from hf_cpu_accel.ops.registry import by_name


class _Layer(LayerArguments):
    """A layer, step by step; `step` has the arguments of the op."""

    def attend(self, x: Tensor, keys: Tensor, values: Tensor, past: int, step: Any) -> Tensor:
        """Compute the attention branch of x [B, q_len, C] without its norms, or its recurrence."""
        if self.layout.recurrence.kind:
            return recurrence_reference(self, x, (keys, values))
        heads, kv_heads = self.layout.heads, self.layout.kv_heads
        head_dim = self.layout.head_dim
        batch, q_len, features = x.shape
        kv_len = past + q_len
        merged = self.project(self.layout.qkv, x, self.layout.qkv_features)
        query = self.rotate(
            self.head_norm("query_norm", self.heads_of(self.layout.query, merged, heads, head_dim)),
            step.rotary,
        )
        if not self.layout.shares_keys:
            self.store(merged, keys[:batch, :, past:kv_len], values[:batch, :, past:kv_len], step)

        row = torch.arange(batch)[:, None].expand(batch, kv_len).clone()
        if step.rows is not None:
            row[:, :past] = step.rows[:, max(step.past) - past : max(step.past)].long()
            if step.start is not None:  # those of padding may be anything
                padded = torch.arange(past + q_len) < step.start[:, None] - (max(step.past) - past)
                row = row.masked_fill(padded, 0)
        group = heads // kv_heads
        key, value = (
            from_storage(cache[row, :, torch.arange(kv_len)], torch.float32)
            .transpose(1, 2)
            .repeat_interleave(group, dim=1)
            for cache in (keys, values)
        )
        visible = self.visible(batch, q_len, past, step)
        scores = self.scores(query.transpose(1, 2), key, visible, past, step)
        sinks = self.vector(self.layout.sinks, heads)
        if sinks is not None:
            sinks = sinks[:, None, None].expand(batch, heads, q_len, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        nothing = (scores == -torch.inf).all(dim=-1, keepdim=True)
        weights = torch.softmax(scores, dim=-1).masked_fill(nothing, 0.0)[..., :kv_len]
        reached = visible.any(dim=1)[:, None, :, None]
        context = weights @ value.masked_fill(
            ~reached, 0.0
        )  # 0 * NaN: what is not seen must not reach the output
        context = self.head_norm("attention_sub_norm", context.transpose(1, 2))
        return self.project(self.layout.output, self.gate(context, merged).flatten(-2), features)

    def store(self, merged: Tensor, keys: Tensor, values: Tensor, step: Any) -> None:
        """Write the new tokens' keys and values [B, kv_heads, q_len, ...], which are views of the cache."""
        kv_heads = self.layout.kv_heads
        key = self.head_norm(
            "key_norm", self.heads_of(self.layout.key, merged, kv_heads, self.layout.head_dim)
        )
        value = self.head_norm(
            "value_norm", self.heads_of(self.layout.value, merged, kv_heads, self.layout.value_dim)
        )
        keys.copy_(to_storage(self.rotate(key, step.rotary).transpose(1, 2), keys.dtype))
        values.copy_(to_storage(value.transpose(1, 2), values.dtype))

    def gate(self, context: Tensor, merged: Tensor) -> Tensor:
        """Multiply context [B, q_len, heads, value_dim] by its gate in the output of the qkv projection."""
        activation = GATE_ACTIVATIONS[self.layout.gate_activation]
        if activation == "none":
            return context
        gate = self.heads_of(self.layout.gate, merged, context.shape[2], self.layout.gate_dim)
        return context * (gate.sigmoid() if activation == "sigmoid" else F.softplus(gate))

    def visible(self, batch: int, q_len: int, past: int, step: Any) -> Tensor:
        """Return the mask [B, q_len, kv_len] of causality, window and left padding."""
        position, key = torch.arange(past, past + q_len)[:, None], torch.arange(past + q_len)
        seen = key <= position
        if self.layout.window:
            seen = seen & (key > position - self.layout.window)
        seen = seen.expand(batch, q_len, past + q_len)
        if step.start is not None:
            seen = seen & (key >= step.start[:, None, None] - (max(step.past) - past))
        return seen

    def scores(self, query: Tensor, key: Tensor, visible: Tensor, past: int, step: Any) -> Tensor:
        """Return the scores [B, heads, q_len, kv_len], -infinity where a query does not see a key."""
        scores = self.scalars.scale * query @ key.transpose(-1, -2)
        if self.scalars.softcap:
            scores = self.scalars.softcap * torch.tanh(scores / self.scalars.softcap)
        alibi = self.vector(self.layout.alibi, query.shape[1])
        q_len, kv_len = scores.shape[-2:]
        if alibi is not None:
            distance = torch.arange(past, past + q_len)[:, None] - torch.arange(kv_len)
            scores = scores - alibi[:, None, None] * distance
        relative = self.vector(self.layout.relative, query.shape[1] * self.layout.relative_count)
        if relative is not None:
            distance = torch.arange(past, past + q_len)[:, None] - torch.arange(kv_len)
            nearest_last = relative.view(query.shape[1], -1)
            scores = (
                scores + nearest_last[:, (nearest_last.shape[1] - 1 - distance.clamp_min(0)).clamp_min(0)]
            )
        if step.mask is not None:
            mask = step.mask[..., max(step.past) - past :]
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        return scores.masked_fill(~visible[:, None], -torch.inf)

    def cross(self, x: Tensor, keys: Tensor, values: Tensor, step: Any) -> Tensor:
        """Compute the cross-attention branch of x [B, q_len, C] without its norms."""
        heads, head_dim = self.layout.cross_heads, self.layout.cross_head_dim
        query = self.project(self.layout.cross_query, x, heads * head_dim).unflatten(-1, (heads, head_dim))
        scale = self.scalars.cross_scale
        if step.cross_rows is not None:
            keys, values = (cache[step.cross_rows.long()] for cache in (keys, values))
        context = attention_reference(query.transpose(1, 2), keys, values, step.cross_padding, False, scale)
        return self.project(self.layout.cross_output, context.flatten(-2), x.shape[-1])

    def feed_forward(self, x: Tensor) -> Tensor:
        """Compute the FFN of x [B, q_len, C], or its experts, without its norms."""
        return self.mixture(x) if self.layout.experts else self.dense(x)

    def dense(self, x: Tensor) -> Tensor:
        """Compute the FFN, or a shared expert, of x [B, q_len, C]."""
        intermediate = self.layout.intermediate_features
        activation = ACTIVATIONS[self.layout.activation]
        if self.layout.gated:
            gate, up = self.project(self.layout.up, x, 2 * intermediate).split(intermediate, dim=-1)
            hidden = FUNCTIONS[activation](gate) * up
        else:
            hidden = self.project(self.layout.up, x, intermediate, activation)
        return self.project(self.layout.down, self.norm("ffn_sub_norm", hidden), x.shape[-1])

    def per_layer(self, x: Tensor, step: Any) -> Tensor:
        """Compute the branch of the per-layer input of x [B, q_len, C]."""
        activation = ACTIVATIONS[self.layout.per_layer_activation]
        gate = self.project(self.layout.per_layer_gate, x, self.layout.per_layer_features, activation)
        own = step.per_layer_inputs[self.layout.per_layer_input].float()
        return self.norm(
            "per_layer_post_norm", self.project(self.layout.per_layer_output, gate * own, x.shape[-1])
        )

    def mixture(self, x: Tensor) -> Tensor:
        """Compute the mixture of experts of x [B, q_len, C]."""
        experts, width, features = self.layout.experts, self.layout.expert_features, x.shape[-1]
        gated = bool(self.layout.experts_gated)
        logits = self.project(self.layout.router, x, experts + self.layout.shared_gate)
        scores = logits[..., :experts]
        sigmoid = SCORINGS[self.layout.scoring] == "sigmoid"
        scores = scores.sigmoid() if sigmoid else scores.softmax(dim=-1)
        bias = self.vector(self.layout.choice_bias, experts)
        index = (scores if bias is None else scores + bias).topk(self.layout.top_k, dim=-1).indices
        weights = scores.gather(-1, index)
        if self.layout.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        up, down = self.weight(self.layout.experts_up.weight), self.weight(self.layout.experts_down.weight)
        assert up is not None
        assert down is not None
        output = experts_reference(
            x.flatten(0, 1),
            index.flatten(0, 1),
            weights.flatten(0, 1) * self.scalars.experts_scale,
            up,
            self.weight(self.layout.experts_up.scale),
            self.vector(self.layout.experts_up.bias, experts * (1 + gated) * width),
            down,
            self.weight(self.layout.experts_down.scale),
            self.vector(self.layout.experts_down.bias, experts * features),
            experts,
            width,
            gated,
            ACTIVATIONS[self.layout.experts_activation],
            self.scalars.experts_limit,
        ).view(x.shape)
        if self.weight(self.layout.up.weight) is None:
            return output
        shared = self.dense(x)
        return output + (shared * logits[..., experts:].sigmoid() if self.layout.shared_gate else shared)

    def forward(
        self,
        x: Tensor,
        cache: tuple[Tensor, Tensor],
        past: int,
        cross_cache: tuple[Tensor, Tensor] | None,
        step: Any,
    ) -> Tensor:
        def attention(x: Tensor) -> Tensor:
            branch = self.attend(self.norm("attention_norm", x), *cache, past, step)
            return self.scalars.residual_scale * self.norm("attention_post_norm", branch)

        def ffn(x: Tensor) -> Tensor:
            branch = self.feed_forward(self.norm("ffn_norm", x))
            return self.scalars.residual_scale * self.norm("ffn_post_norm", branch)

        if self.layout.parallel:
            return self.end(x + attention(x) + ffn(x), step)
        x = self.norm("attention_out_norm", x + attention(x))
        if cross_cache:
            branch = self.cross(self.norm("cross_norm", x), *cross_cache, step)
            x = self.norm("cross_out_norm", x + self.scalars.residual_scale * branch)
        if self.weight(self.layout.up.weight) is None and not self.layout.experts:
            return x
        return self.end(self.norm("ffn_out_norm", x + ffn(x)), step)

    def end(self, x: Tensor, step: Any) -> Tensor:
        """Compute the steps after the FFN for x [B, q_len, C]."""
        if self.layout.per_layer_features:
            x = x + self.per_layer(x, step)
        return self.scalars.output_scale * x


SCHEMA = (
    "decoder_layers(Tensor hidden_states, Tensor[] weights, Tensor vectors, Tensor layout, Tensor scalars, Tensor(a!)[] keys, "
    "Tensor(b!)[] values, int[] past, Tensor[] rotary, Tensor? start, Tensor? rows, Tensor? mask, "
    "Tensor[] cross_keys, Tensor[] cross_values, Tensor? cross_padding, Tensor? cross_rows, "
    "Tensor[] per_layer_inputs) -> Tensor"
)


@by_name(SCHEMA)
def decoder_layers_reference(given: Any) -> Tensor:
    """Compute the op in PyTorch."""
    start, longest = given.start, max(given.past)
    x = given.hidden_states.float()
    padding = torch.zeros(x.shape[:2], dtype=torch.bool)
    if start is not None:
        padding = torch.arange(longest, longest + x.shape[1]) < start[:, None]
    x = x.masked_fill(padding[..., None], 0.0)  # whatever is there does not reach the rest
    rows = zip(given.layout.tolist(), given.scalars.tolist(), strict=True)
    for number, (integers, floats) in enumerate(rows):
        layer = _Layer(given.weights, given.vectors, integers, floats)
        cache = given.keys[number], given.values[number]
        cross_cache = (given.cross_keys[number], given.cross_values[number]) if given.cross_keys else None
        x = layer.forward(x, cache, given.past[number], cross_cache, given)
    return x.masked_fill(padding[..., None], 0.0).to(given.hidden_states.dtype).contiguous()
