"""`nn.LSTM` with packed weights: one product for the inputs of all steps, and then all steps of a layer in one op call.

The module keeps its parameters, since state dicts, hooks and its own forward (packed sequences) read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.lazy.lazy_tensor import ordinary
from hf_cpu_accel.ops.linear import linear
from hf_cpu_accel.ops.recurrent.lstm_layer import lstm_layer
from hf_cpu_accel.packing.linear import QUANTIZED, PackedWeight, pack_linear
from hf_cpu_accel.patching.accelerated_module import CopiedParameter
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, conflicting_names, fused_layer
from hf_cpu_accel.patching.hooks import is_plain
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.context import MAX_INTEGER_FEATURES, WEIGHT_DTYPES, Context
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.runtime.tracing import is_tracing
from hf_cpu_accel.tolerance import PACKED

STRUCTURE = "lstm"
_LEAST_FEATURES = 128  # of the hidden state
# In floating point, torch's kernel, which reorders the weights in each call, is as fast with more steps of all sequences
# than that; or with more sequences and a projection, which oneDNN does not support.
_MOST_ROWS, _MOST_PROJECTED = 512, 16


@dataclass(frozen=True)
class Direction:
    """The weights of a layer in one direction.

    Attributes:
        suffix: the suffix of the names of its parameters.
        input: [4 * hidden_size, features of the input].
        hidden: [4 * hidden_size, features of the hidden state].
        projection: [proj_size, hidden_size], or None.
    """

    suffix: str
    input: PackedWeight
    hidden: PackedWeight
    projection: PackedWeight | None

    @property
    def nbytes(self) -> int:
        weights = (self.input, self.hidden, self.projection)
        return sum(weight.nbytes for weight in weights if weight is not None)


class FusedLSTM(FusedModuleMixin):
    """Mixed into `nn.LSTM`: [L, B, input_size], [B, L, input_size] if `batch_first`, or [L, input_size]; returns what the
    original returns."""

    _packed: tuple[Direction, ...]  # layer after layer, the backward direction behind the forward one

    def forward(self, input: Any, hx: Any = None) -> Any:
        input, given = ordinary(input), None if hx is None else tuple(map(ordinary, hx))
        if not self._fits(input, given) or self.is_watched or is_tracing():
            return self._original_class.forward(self, input, given)
        check_inference(self, input)
        rows = input[:, None] if input.dim() == 2 else input.transpose(0, 1) if self.batch_first else input
        output, states = self._compute(rows.float(), given)
        dtype = input.dtype
        states = [state.to(dtype) if input.dim() == 3 else state[:, 0].to(dtype) for state in states]
        if input.dim() == 2:
            output = output[:, 0]
        elif self.batch_first:
            output = output.transpose(0, 1)
        return output.to(dtype), tuple(states)

    def copied_parameters(self) -> Iterator[CopiedParameter]:
        """Yield the packed weights; biases are read in place."""
        for name in self._parameters:
            if name.startswith("weight"):
                yield CopiedParameter(self._parameters, name, is_packed=True)

    def _compute(self, rows: Tensor, given: tuple[Tensor, Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        """Compute [L, B, input_size] float32 -> [L, B, features] and the states after the last step."""
        length, batch, _ = rows.shape
        states = [rows.new_zeros(len(self._packed), batch, size) for size in self._state_sizes]
        for state, first in zip(states, given or (), strict=False):
            state.copy_(first if first.dim() == 3 else first[:, None])
        hidden, cell = states
        directions = 2 if self.bidirectional else 1
        for begin in range(0, len(self._packed), directions):
            outputs = []
            for number, part in enumerate(self._packed[begin : begin + directions], start=begin):
                gates = linear(rows.reshape(length * batch, -1), part.input, self._bias(part.suffix))
                backward = number > begin
                output = lstm_layer(
                    gates.view(length, batch, -1), part.hidden, part.projection, hidden[number], cell[number], reverse=backward
                )  # fmt: skip
                hidden[number] = output[0 if backward else -1]
                outputs.append(output)
            rows = outputs[0] if directions == 1 else torch.cat(outputs, dim=2)
        return rows, states

    def _bias(self, suffix: str) -> Tensor | None:
        """Return the sum of the two biases of the host, with current values."""
        if not self.bias:
            return None
        return self._parameters[f"bias_ih{suffix}"].float() + self._parameters[f"bias_hh{suffix}"].float()  # type: ignore[union-attr]

    @property
    def _state_sizes(self) -> tuple[int, int]:
        return self.proj_size or self.hidden_size, self.hidden_size

    def _fits(self, input: Any, given: Any) -> bool:
        """Return whether the op supports the call; for others the original raises its own errors."""
        if not isinstance(input, Tensor) or input.dtype not in WEIGHT_DTYPES or input.dim() not in (2, 3):
            return False
        if input.shape[-1] != self.input_size or not input.numel():
            return False
        batch = () if input.dim() == 2 else (input.shape[0 if self.batch_first else 1],)
        if not self._gains(input.numel() // self.input_size, *batch):
            return False
        if given is None:
            return True
        shapes = [(len(self._packed), *batch, size) for size in self._state_sizes]
        states = [state for state in given if isinstance(state, Tensor) and state.dtype is input.dtype]
        return len(given) == 2 and [tuple(state.shape) for state in states] == shapes

    def _gains(self, rows: int, batch: int = 1) -> bool:
        """Return whether it is faster than torch's kernel."""
        if self._packed[0].hidden.dtype in QUANTIZED:
            return True
        return batch <= _MOST_PROJECTED if self.proj_size else rows <= _MOST_ROWS

    # Attributes of the class that this is mixed into.
    input_size: int
    hidden_size: int
    proj_size: int
    bias: bool
    batch_first: bool
    bidirectional: bool


class LSTMRule:
    """`nn.LSTM` of enough features."""

    name = "lstm"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        if not isinstance(module, nn.LSTM) or type(module).forward is not nn.LSTM.forward:
            return None
        weights = list(module.parameters(recurse=False))
        usual = all(weight.dtype in WEIGHT_DTYPES for weight in weights) and is_plain(module)
        if not usual or not context.tree.slots[id(module)] or context.skipped(path):
            return None
        sizes = (module.input_size, module.hidden_size, module.proj_size)
        if module.hidden_size < _LEAST_FEATURES or max(sizes) * 2 > MAX_INTEGER_FEATURES:
            return None
        if conflicting_names(FusedLSTM, module, ("_packed",)):
            return None
        dtype = context.dtypes.at(path)
        return Match(module, path, "int8" if dtype in QUANTIZED else dtype)

    def apply(self, match: Match, context: Context) -> Outcome:
        module, dtype = match.module, match.data
        assert isinstance(module, nn.LSTM)
        packed = tuple(_direction(module, suffix, dtype) for suffix in _suffixes(module))
        fused: Any = fused_layer(FusedLSTM, module, _packed=packed)
        if context.config.verify:
            generator = torch.Generator().manual_seed(0)
            of = module.get_parameter("weight_ih_l0").dtype
            rows = torch.randn(3, 2, module.input_size, generator=generator).to(of)
            with torch.no_grad():
                ours, theirs = (layer(rows)[0] for layer in (fused, module))
            reason = compare(ours, theirs).reason(PACKED.of(dtype, of))
            if reason is not None:
                return Outcome((PlanItem.left(match.path, STRUCTURE, reason),), (module,))
        context.swap(module, fused)
        nbytes = sum(part.nbytes for part in packed)
        item = PlanItem(match.path, STRUCTURE, "lstm_layer", dtype, nbytes, None, provider="ours")
        return Outcome((item,), (module,))


def _suffixes(module: nn.LSTM) -> list[str]:
    ends = ("", "_reverse") if module.bidirectional else ("",)
    return [f"_l{layer}{end}" for layer in range(module.num_layers) for end in ends]


def _direction(module: nn.LSTM, suffix: str, dtype: str) -> Direction:
    def packed(name: str) -> PackedWeight:
        return pack_linear(module.get_parameter(f"{name}{suffix}").detach(), dtype)

    projection = packed("weight_hr") if module.proj_size else None
    return Direction(suffix, packed("weight_ih"), packed("weight_hh"), projection)
