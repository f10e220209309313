"""Verify a match: the fused layer must agree with the layer for a prompt and for the token after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import compare, is_rounding
from hf_cpu_accel.lazy.causal_mask import CausalMask
from hf_cpu_accel.lazy.position_bias import PositionBias
from hf_cpu_accel.lazy.shared_heads import KeptHeads
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.grouping import disable_grouping
from hf_cpu_accel.rewrite.core.refusal import required
from hf_cpu_accel.rewrite.decoder.caches import storage_of
from hf_cpu_accel.rewrite.decoder.calls import LayerCall
from hf_cpu_accel.rewrite.decoder.deferred import DeferredHiddenStates
from hf_cpu_accel.rewrite.decoder.experts_parts import MixtureParts
from hf_cpu_accel.rewrite.decoder.layer import fuse
from hf_cpu_accel.rewrite.decoder.masks import mask_like
from hf_cpu_accel.rewrite.decoder.prompt import PADDING
from hf_cpu_accel.rewrite.decoder.role import Role
from hf_cpu_accel.tolerance import DECODER_LAYER


class Verification:
    """The outputs of a layer for a prompt and the token after it, with a cache and a mask, and for a prompt without either.

    The first sequence of the batch is padded on the left. Tables and positions are those with which the model called the layer,
    and those of the last token again for the one after it.

    Args:
        layer: the layer, which stays unchanged.
        dtype: of the activations; None for the dtype in which the model called the layer.
        biases: the tables of the position biases among its arguments, by name; None for zeros.
    """

    def __init__(
        self,
        layer: nn.Module,
        call: LayerCall,
        cache_index: int,
        dtype: torch.dtype | None,
        biases: Mapping[str, Tensor | None],
    ) -> None:
        self.layer = layer
        self.call = call
        self.cache_index = cache_index
        self.dtype = dtype or call.hidden_states.dtype
        self.biases = biases
        batch, prompt, features = call.hidden_states.shape
        generator = torch.Generator().manual_seed(3)
        self.hidden_states = torch.randn(batch, prompt + 1, features, generator=generator).to(self.dtype)
        self.tokens = torch.ones(batch, prompt + 1, dtype=torch.bool)
        self.tokens[0, :PADDING] = False
        self._expected: dict[tuple[int | None, bool], list[Tensor]] = {}

    @property
    def tolerance(self) -> float:
        """Return the allowed error of a correct match."""
        return DECODER_LAYER.of(self.dtype)

    def error(self, role: Role, *, masked: bool = True) -> float:
        """Return the error of the layer fused by `role`, relative to its change of the hidden states, of the worst row; with
        experts, the worst of most rows.

        Args:
            masked: with a cache and a mask, or without either.

        Raises:
            Refused: the layer rejects the arguments.
        """
        key = (role.parts.window, masked)
        if key not in self._expected:
            self._expected[key] = self._run(self.layer, role, masked=masked)
        fused = fuse(self.layer, role)
        changes = []
        for ours, theirs in zip(self._run(fused, role, masked=masked), self._expected[key], strict=True):
            if not isinstance(
                ours, DeferredHiddenStates
            ):  # the layer's own forward ran, which proves nothing
                return float("inf")
            q_len = theirs.shape[1]
            part = slice(None, q_len) if q_len > 1 else slice(-1, None)
            before, shown = self.hidden_states[:, part], self.tokens[:, part]
            if not masked:
                shown = torch.ones_like(shown)
            # In bfloat16 the change of large hidden states is too coarse to be compared by itself.
            base = before.float() if self.dtype is torch.float32 else torch.zeros(())
            changes.append(((ours - base)[shown], (theirs - base)[shown]))
        comparison = compare(*map(list, zip(*changes, strict=True)))
        # If two experts have nearly equal scores, rounding may send a token to the other one.
        return comparison.most if isinstance(role.parts.ffn, MixtureParts) else comparison.worst

    def is_rounding(self, role: Role) -> bool:
        """Return whether the fused layer is no farther from the layer in float32 than the layer itself is, when rounding between
        its ops exceeds the tolerance. Unscaled scores (Gemma 4) turn small differences into large ones.

        Raises:
            Refused: the layer does not accept float32.
        """
        exact = Verification(self.layer, self.call, self.cache_index, torch.float32, self.biases)
        exact.hidden_states = self.hidden_states.float()
        worst = []
        for verification, module in ((exact, self.layer), (self, self.layer), (self, fuse(self.layer, role))):
            outputs = verification._run(module, role, masked=True)
            shown = self.tokens[:, :-1], self.tokens[:, -1:]
            rows = [output.float()[tokens] for output, tokens in zip(outputs, shown, strict=True)]
            worst.append(torch.cat(rows))
        truth, own, ours = worst
        return is_rounding(ours, own, truth)

    def _run(self, module: nn.Module, role: Role, *, masked: bool) -> list[Tensor]:
        call, prompt = self.call, self.call.hidden_states.shape[1]
        with_cache = masked or role.shared is not None
        cache = _cache(self.cache_index, crosses=call.encoder is not None) if with_cache else None
        steps = [(slice(0, prompt), slice(None))]
        if masked:
            steps.append((slice(prompt, None), slice(-1, None)))
        outputs = []
        with torch.no_grad(), disable_grouping():
            for part, positions in steps:
                states, shown = self.hidden_states[:, part], self.tokens[:, : part.stop]
                arguments = {
                    name: _at(value, self.dtype, positions) for name, value in call.arguments.items()
                }
                arguments |= self._of_encoder(states.shape[1], masked=masked)
                arguments |= self._biases(states.shape[1], shown.shape[1])
                if role.shared is not None:
                    arguments[role.shared] = self._shared(role, cache, part, own=module is self.layer)
                batch, q_len, _ = states.shape
                mask = CausalMask.of(batch, q_len, shown.shape[1], 0, role.parts.window_of_masks, shown)
                if role.slopes is not None:
                    start = torch.tensor([PADDING * masked, *[0] * (batch - 1)])
                    given = call.arguments[role.slopes.name].to(self.dtype)
                    arguments[role.slopes.name] = role.slopes.like(given, start, shown.shape[1])
                other = call.arguments[call.mask]
                arguments[call.mask] = mask_like(other, mask, role.mask_form, self.dtype) if masked else None
                arguments[call.cache] = cache
                own = module is self.layer
                output = (
                    required(call_foreign(module, states, **arguments))
                    if own
                    else module(states, **arguments)
                )
                output = output[0] if isinstance(output, tuple) else output
                if isinstance(output, DeferredHiddenStates):
                    output.tensor  # noqa: B018 (the next step needs its keys in the cache)
                outputs.append(output)
        return outputs

    def _of_encoder(self, q_len: int, *, masked: bool) -> dict[str, Any]:
        call = self.call
        if call.encoder is None:
            return {}
        arguments: dict[str, Any] = {call.encoder: call.arguments[call.encoder].to(self.dtype)}
        if call.encoder_mask is not None:
            mask = call.arguments[call.encoder_mask]
            if mask is not None:
                mask = mask[:, :, :1].to(self.dtype if mask.is_floating_point() else mask.dtype)
                mask = mask.expand(-1, -1, q_len, -1) if masked else None
            arguments[call.encoder_mask] = mask
        return arguments

    def _shared(self, role: Role, cache: Any, part: slice, *, own: bool) -> dict[str, Any]:
        """Return the keys and values of earlier layers for a call with some of the tokens, as ordinary tensors for the own
        forward."""
        if role.takes is None:
            return {}
        batch, tokens = self.hidden_states.shape[:2]
        generator, sizes = torch.Generator().manual_seed(4), (role.parts.head_dim, role.parts.value_dim)
        heads = [
            torch.randn(batch, role.parts.kv_heads, tokens, size, generator=generator)
            .to(self.call.hidden_states.dtype)  # float32 of the same values, if that is asked for
            .to(self.dtype)
            for size in sizes
        ]
        start, end, _ = part.indices(tokens)
        if own:
            return {role.takes: tuple(states[:, :, :end] for states in heads)}
        kept = KeptHeads(cache, end - start, start, None, end, 0)
        cache.update(*(states[:, :, start:end] for states in heads), role.cache_index)
        kept.store = storage_of(cache, role.cache_index, role.parts.repeats)
        kept.stored = start
        kept.end()
        return {role.takes: kept.handed((batch, role.parts.kv_heads, *sizes), self.dtype)}

    def _biases(self, q_len: int, kv_len: int) -> dict[str, Any]:
        return {
            name: PositionBias.of(
                table,
                self.call.arguments[name].shape[1],
                q_len,
                self.call.arguments[name].shape[3] if table is None else kv_len,
                self.dtype,
            )
            for name, table in self.biases.items()
        }


def _at(value: Any, dtype: torch.dtype, positions: slice) -> Any:
    """Return the argument for some of its positions."""
    if isinstance(value, tuple):
        return tuple(_at(part, dtype, positions) for part in value)
    if isinstance(value, Tensor) and not isinstance(value, CausalMask) and value.dim() in (2, 3):
        value = value[:, positions]
        return value.to(dtype) if value.is_floating_point() else value
    return value


def _cache(cache_index: int, *, crosses: bool) -> Any:
    """Return a `CPUCache` with room for the layer."""
    from transformers import EncoderDecoderCache, PreTrainedConfig

    from hf_cpu_accel.generate.cache import CPUCache, CPUCrossCache

    config = PreTrainedConfig()
    config.num_hidden_layers = cache_index + 1
    return EncoderDecoderCache(CPUCache(config), CPUCrossCache(config)) if crosses else CPUCache(config)
