"""The supported formats of quantized checkpoints, by the `quant_method` in their config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from hf_cpu_accel.checkpoints.awq import AwqCheckpoint
from hf_cpu_accel.checkpoints.compressed_tensors import CompressedTensorsCheckpoint
from hf_cpu_accel.checkpoints.fp8 import Fp8Checkpoint
from hf_cpu_accel.checkpoints.gptq import GptqCheckpoint
from hf_cpu_accel.checkpoints.layout import Layout, Tensors, UnreadableCheckpoint


class Checkpoint(Protocol):
    """The config of a quantized checkpoint.

    Attributes:
        marks: the names of tensors that only quantized linears have.
        not_honored: settings of the config besides the weights that are ignored, as texts.
    """

    @property
    def marks(self) -> tuple[str, ...]: ...

    @property
    def not_honored(self) -> tuple[str, ...]: ...

    def layout(self, path: str, out_features: int, in_features: int, tensors: Tensors) -> Layout | None:
        """Return the layout of the linear at `path`; None if it has a plain weight."""


FORMATS: dict[str, Callable[[Mapping[str, Any]], Checkpoint]] = {
    "gptq": GptqCheckpoint.of,
    "awq": AwqCheckpoint.of,
    "compressed-tensors": CompressedTensorsCheckpoint.of,
    "fp8": Fp8Checkpoint.of,
}


def checkpoint_of(config: Mapping[str, Any]) -> Checkpoint:
    """Read a `quantization_config`.

    Raises:
        UnreadableCheckpoint: the method or the form is not supported.
    """
    method = config.get("quant_method")
    if method not in FORMATS:
        raise UnreadableCheckpoint(
            f"quant_method={method!r} is not supported; expected one of {', '.join(FORMATS)}"
        )
    return FORMATS[method](config)
