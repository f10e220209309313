"""Record the calls of a decoder layer as it runs: packed linears and experts, attention in every form, the cache."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.rewrite.core.foreign_code import OwnError
from hf_cpu_accel.rewrite.core.grouping import disable_grouping
from hf_cpu_accel.rewrite.core.refusal import Refusal, Refused, required
from hf_cpu_accel.rewrite.core.trace import BADDBMM, BMM, MATMUL, SOFTMAX, Listener, traced
from hf_cpu_accel.rewrite.decoder.randomized_copy import attention_configs
from hf_cpu_accel.rewrite.decoder.trace import (
    AttentionCall,
    DecoderTrace,
    ExpertsCall,
    FFNCall,
    LinearCall,
    OpCall,
    Stored,
)
from hf_cpu_accel.rewrite.experts.layer import PackedExperts
from hf_cpu_accel.rewrite.linear.layer import PackedLinear

_OPS = torch.ops.hf_cpu_accel
_CLIPS = (torch.ops.aten.clamp.default, torch.ops.aten.clamp_.default)
OTHER_STATE = "it keeps state besides keys and values: its parts run separately"
_OF_SOME = "it passes only some tokens to its linears, as routers do: its parts run separately"
_IMPLEMENTATION = "_attn_implementation_internal"


@contextmanager
def record_calls(layer: nn.Module, trace: DecoderTrace) -> Iterator[None]:
    """Record the calls inside of `layer`, a randomized copy, in `trace`."""
    functions, ops = _WrittenAttention(trace).listeners, _PackedCalls(layer, trace).listeners
    with disable_grouping(), _dispatched_attention(layer, trace), traced(ops=ops, functions=functions):
        yield


def recording_cache(trace: DecoderTrace, past: int) -> Any:
    """Return a cache that records updates in `trace`, and pretends to hold `past` tokens."""
    from transformers import DynamicCache, EncoderDecoderCache

    class Recording(DynamicCache):
        def get_conv_state(self, *args: Any, **kwargs: Any) -> Tensor | None:
            raise OwnError(Refused(Refusal(OTHER_STATE)))

        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            trace.stored.append(Stored(key_states, value_states, layer_idx))
            return key_states, value_states

    class Filled(Recording):
        def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            key, value = super().update(*args, **kwargs)
            return (key, value) if not past else (_longer(key, past), _longer(value, past))

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return past

    return Filled() if trace.encoder is None else EncoderDecoderCache(Filled(), Recording())


def recording_mapping(trace: DecoderTrace, held: Mapping[str, tuple[Tensor, Tensor]]) -> Any:
    """Return a mapping in which a layer finds keys and values like those in `held`, and that records their use in `trace`."""

    class Recording(UserDict[str, Any]):
        def __getitem__(self, key: str) -> tuple[Tensor, Tensor]:
            generator = torch.Generator().manual_seed(4)
            batch, tokens = trace.input.shape[:2]
            key_states, value_states = (
                torch.randn(batch, part.shape[1], tokens, part.shape[3], generator=generator)
                for part in held[key]
            )
            trace.takes = key
            trace.stored.append(Stored(key_states, value_states, None))
            return key_states, value_states

        def __setitem__(self, key: str, value: Any) -> None:
            trace.keeps = key

    return Recording()


def _longer(states: Tensor, past: int) -> Tensor:
    """Return [B, heads, past + L, D] with arbitrary values, at no cost."""
    return states[:, :, :1].expand(-1, -1, past + states.shape[2], -1)


@contextmanager
def _dispatched_attention(copied: nn.Module, trace: DecoderTrace) -> Iterator[None]:
    """Record attention that is dispatched by the configs of `copied`, which are its own."""
    from transformers import AttentionInterface

    def probe(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        # New values, so that the next reader is known to follow attention.
        shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        output = torch.randn(shape, generator=torch.Generator().manual_seed(2 + len(trace.attention)))
        trace.attention.append(
            AttentionCall(
                query,
                kwargs.get("scaling"),
                kwargs.get("position_bias"),
                window=kwargs.get("sliding_window"),
                softcap=kwargs.get("softcap"),
                sinks=kwargs.get("s_aux"),
                output=output,
            )
        )
        return output.clone(), None

    name = f"hf_cpu_accel_probe_{id(trace)}"  # two models may be traced at the same time
    configs = [vars(config) for config in attention_configs(copied)]
    before = [config.get(_IMPLEMENTATION) for config in configs]
    AttentionInterface.register(name, probe)
    for config in configs:
        config[_IMPLEMENTATION] = name
    try:
        yield
    finally:
        AttentionInterface._global_mapping.pop(name, None)
        for config, implementation in zip(configs, before, strict=True):
            config[_IMPLEMENTATION] = implementation


class _WrittenAttention:
    """Record attention that calls torch itself: a product of a query with the stored key, and its softmax."""

    def __init__(self, trace: DecoderTrace) -> None:
        self.trace = trace
        self.open = False  # a product waits for its softmax
        self.listeners: dict[Any, Listener] = {
            torch.nn.functional.scaled_dot_product_attention: self._dispatched,
            **dict.fromkeys((*MATMUL, *BMM), self._product),
            **dict.fromkeys(BADDBMM, self._product_and_sum),
            **dict.fromkeys(SOFTMAX, self._softmax),
        }

    def _dispatched(self, args: Any, kwargs: Any, output: Any) -> None:
        query = args[0] if args else kwargs["query"]
        self.trace.attention.append(AttentionCall(query, kwargs.get("scale")))

    def _product(self, args: Any, kwargs: Any, output: Any) -> None:
        self._note_product(*args[:2])

    def _product_and_sum(self, args: Any, kwargs: Any, output: Any) -> None:
        self._note_product(*args[1:3], *(kwargs[name] for name in ("batch1", "batch2") if name in kwargs))

    def _note_product(self, query: Tensor, key: Tensor) -> None:
        """Record the product; heads may be merged with the batch."""
        if not self.trace.stored or self.trace.attention or query.dim() not in (3, 4):
            return
        stored = self.trace.stored[0].key
        expected = stored.mT if key.dim() == 4 else stored.mT.flatten(0, 1)
        if key.shape == expected.shape and torch.equal(key, expected.to(key.dtype)):
            if query.dim() == 3:
                query = query.unflatten(0, stored.shape[:2])
            self.trace.attention.append(AttentionCall(query, None))
            self.open = True

    def _softmax(self, args: Any, kwargs: Any, output: Any) -> None:
        """Record the softmax of the product."""
        if not self.open:
            return
        self.open = False
        call, stored = self.trace.attention[-1], self.trace.stored[0]
        shape = (*call.query.shape[:3], stored.key.shape[2])
        self.trace.attention[-1] = dataclasses.replace(call, scores=args[0].detach().reshape(shape))


class _PackedCalls:
    """Record the calls of packed linears and experts."""

    def __init__(self, layer: nn.Module, trace: DecoderTrace) -> None:
        self.trace = trace
        self.packed = {m.packed.data.data_ptr(): m for m in layer.modules() if isinstance(m, PackedLinear)}
        self.experts = {
            m.weights.up.data.data_ptr(): m for m in layer.modules() if isinstance(m, PackedExperts)
        }
        self.listeners: dict[Any, Listener] = {
            _OPS.linear.default: self._linear_called,
            _OPS.ffn.default: self._ffn_called,
            _OPS.experts_ffn.default: self._experts_called,
            **dict.fromkeys(_CLIPS, self._clipped),
        }

    def _linear_called(self, args: Any, kwargs: Any, output: Tensor) -> None:
        residual = args[4]  # which an epilogue adds: the branch ends before it
        branch = output if residual is None else output - residual
        self._note(LinearCall(self._linear(args[1]), self._rows(args[0]), self._rows(branch), args[6]))

    def _ffn_called(self, args: Any, kwargs: Any, output: Tensor) -> None:
        up, down = self._linear(args[1]), self._linear(args[4])
        self._note(FFNCall(up, down, args[10], self._rows(args[0]), self._rows(output)))

    def _experts_called(self, args: Any, kwargs: Any, output: Tensor) -> None:
        rows = [self._rows(part) for part in (*args[:3], output)]
        self._note(ExpertsCall(self.experts[args[3].data_ptr()], *rows))

    def _clipped(self, args: Any, kwargs: Any, output: Tensor) -> None:
        self.trace.clips |= not self.trace.stored

    def _linear(self, weight: Tensor) -> PackedLinear:
        """Return the packed linear with this weight.

        Raises:
            Refused: it does not belong to the layer.
        """
        linear = self.packed.get(weight.data_ptr())
        return required(Refusal("it calls a linear of another module") if linear is None else linear)

    def _note(self, call: OpCall) -> None:
        self.trace.stages[min(len(self.trace.stored), 2)].append(call)

    def _rows(self, tensor: Tensor) -> Tensor:
        """Return a tensor of any number of dimensions as [B, L, ...].

        Raises:
            Refused: it has only some tokens, such as those that a router sends to an expert (Switch Transformers).
        """
        batch = len(self.trace.input)
        rows = tensor.shape[:-1].numel()
        required(Refusal(_OF_SOME) if rows % batch or not rows else tensor)
        return tensor.detach().clone().view(batch, -1, tensor.shape[-1])
