"""The kinds of quantized checkpoints that are read, by the `quant_method` in their config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from hf_cpu_accel.checkpoints.awq import AwqCheckpoint
from hf_cpu_accel.checkpoints.compressed_tensors import CompressedTensorsCheckpoint
from hf_cpu_accel.checkpoints.fp8 import Fp8Checkpoint
from hf_cpu_accel.checkpoints.gptq import GptqCheckpoint
from hf_cpu_accel.checkpoints.layout import Layout, Tensors, UnreadableCheckpoint


class Checkpoint(Protocol):
    """What a config says of all linears.

    Attributes:
        marks: names of tensors by which a linear shows that it is quantized.
        not_honored: what the config asks for besides the weights, and is not done, in words.
    """

    @property
    def marks(self) -> tuple[str, ...]: ...

    @property
    def not_honored(self) -> tuple[str, ...]: ...

    def layout(self, path: str, out_features: int, in_features: int, tensors: Tensors) -> Layout | None:
        """How the linear at `path` is stored; None if it has a plain weight."""


FORMATS: dict[str, Callable[[Mapping[str, Any]], Checkpoint]] = {
    "gptq": GptqCheckpoint.of,
    "awq": AwqCheckpoint.of,
    "compressed-tensors": CompressedTensorsCheckpoint.of,
    "fp8": Fp8Checkpoint.of,
}


def checkpoint_of(config: Mapping[str, Any]) -> Checkpoint:
    """What a `quantization_config` says.

    Raises:
        UnreadableCheckpoint: a method or a form that is not known.
    """
    method = config.get("quant_method")
    if method not in FORMATS:
        raise UnreadableCheckpoint(
            f"quant_method={method!r} is not supported; expected one of {', '.join(FORMATS)}"
        )
    return FORMATS[method](config)
