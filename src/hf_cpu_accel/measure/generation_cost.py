"""The minimum cost of generating a token: bytes of weights to read, and multiply-adds."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_cpu_accel.packing.linear import PANEL_FEATURES, pack_linear
from hf_cpu_accel.runtime.hardware import Peaks
from hf_cpu_accel.runtime.torch_modes import AroundOps

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MATMULS = frozenset({"aten::mm", "aten::addmm", "aten::linear"})


@dataclass(frozen=True)
class StepWeight:
    """A weight [out_features, in_features], or the part of one expert.

    Attributes:
        modules: the paths of its modules; several if it is tied.
    """

    modules: tuple[str, ...]
    out_features: int
    in_features: int


@dataclass(frozen=True)
class Cost:
    """The work of the linear layers of a model.

    Attributes:
        first_flops: the floating point operations until the first token, two per multiply-add, without attention.
        step_weights: the weights that a token after the first reads, including lm_head, without the embedding table (one row).
    """

    first_flops: int
    step_weights: tuple[StepWeight, ...]

    def step_bytes(self, left: str, packed: Mapping[str, str] = MappingProxyType({})) -> int:
        """Return the bytes of weights per token, including scales, without keys, values and recurrent states.

        Args:
            left: the dtype of the weights that are not packed, see `left_dtype`.
            packed: {path of a module: dtype of its packed weights}, see `Plan.packed_dtypes`.
        """
        return round(sum(_bytes_of(weight, left, packed) for weight in self.step_weights))


def _bytes_of(weight: StepWeight, left: str, packed: Mapping[str, str]) -> float:
    dtype = next((packed[path] for path in weight.modules if path in packed), left)
    return weight.out_features * weight.in_features * bytes_per_weight(dtype, weight.in_features)


def left_dtype(model: PreTrainedModel) -> str:
    """Return the dtype of the weights that are not packed."""
    return str(next(model.parameters()).dtype).removeprefix("torch.")


@functools.cache
def bytes_per_weight(dtype: str, in_features: int = 1024) -> float:
    """Return the bytes per value of a linear layer's weight packed in `dtype`, including its scales."""
    return pack_linear(torch.zeros(PANEL_FEATURES, in_features), dtype).nbytes / (
        PANEL_FEATURES * in_features
    )


def cost(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Cost:
    """Count the cost while an eager model generates two tokens.

    Args:
        inputs: input_ids and attention_mask, int64 [batch, prompt].
    """
    counter = _Counter(model)
    generate: Any = model.generate
    with torch.inference_mode(), AroundOps(counter.around):
        generate(**inputs, max_new_tokens=2, streamer=counter)
    return Cost(counter.flops[0], tuple(counter.weights[1].values()))


def peak_of(peaks: Peaks, dtype: str) -> float:
    """Return the measured peak GFLOP/s (GOP/s) for the matrix products of a prompt with weights packed in `dtype`.

    bfloat16 and int8-weight compute in bfloat16 or float32, whichever is faster on this CPU; int8 and int4 in int8.
    """
    if dtype == "float32":
        return peaks.float32
    return max(peaks.float32, peaks.bfloat16) if dtype in ("bfloat16", "int8-weight") else peaks.int8


class _Counter:
    """Counts matrix products with parameters. As a streamer, it is called between tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._holders: dict[int, list[str]] = defaultdict(list)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._holders[parameter.untyped_storage().data_ptr()].append(name.rpartition(".")[0])
        self._prompt_seen = False
        self.flops = [0]
        self.weights: list[dict[tuple[int, int], StepWeight]] = [{}]

    def around(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = op(*args, **kwargs)
        if op.name().split(".")[0] in _MATMULS:
            for weight in args:
                if isinstance(weight, Tensor) and weight.dim() == 2:
                    self._count(weight, out)
        return out

    def _count(self, weight: Tensor, out: Tensor) -> None:
        pointer = weight.untyped_storage().data_ptr()
        holders = self._holders.get(pointer)
        if holders is None:
            return
        out_features = out.shape[-1]
        in_features = weight.numel() // out_features
        self.flops[-1] += 2 * out.numel() * in_features
        found = StepWeight(tuple(holders), out_features, in_features)
        self.weights[-1][pointer, int(weight.storage_offset())] = found

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            self.flops.append(0)
            self.weights.append({})
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is held back."""
