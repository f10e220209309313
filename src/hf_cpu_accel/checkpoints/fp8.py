"""Checkpoints in float8 with scales per block (DeepSeek, Qwen): weight = weight * weight_scale_inv of its block.

weight            float8_e4m3fn [N, K]
weight_scale_inv  float [ceil(N / rows), ceil(K / columns)]; one number where there are no blocks
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_cpu_accel.checkpoints.gptq import SCALES
from hf_cpu_accel.checkpoints.layout import FloatLayout, Tensors, UnreadableCheckpoint, check_tensor

_SCALES = (*SCALES, torch.float8_e8m0fnu)


@dataclass(frozen=True, eq=False)
class ScaledFloats(FloatLayout):
    """A weight in float8 with scales per block.

    Attributes:
        rows, columns: the size of a block.
    """

    rows: int
    columns: int

    def values(self, tensors: Tensors, first: int, last: int) -> Tensor:
        values = tensors["weight"].detach()[first:last].float()
        scales = tensors[self.scale].detach().float().reshape(-(-self.out_features // self.rows), -1)
        of_rows = scales[torch.arange(first, last) // self.rows]
        return values * of_rows.repeat_interleave(self.columns, dim=1)[:, : self.in_features]


@dataclass(frozen=True)
class Fp8Checkpoint:
    """The config of an fp8 checkpoint.

    Attributes:
        block: output and input features per scale; None for one scale per linear.
    """

    block: tuple[int, int] | None

    marks: ClassVar[tuple[str, ...]] = ("weight_scale_inv",)
    not_honored: ClassVar[tuple[str, ...]] = ("activations in 8 bits",)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Fp8Checkpoint:
        """Read a `quantization_config`.

        Raises:
            UnreadableCheckpoint: the block or the format is not supported.
        """
        form, block = config.get("fmt", "e4m3"), config.get("weight_block_size")
        if form != "e4m3":
            raise UnreadableCheckpoint(f"fp8 with fmt={form!r} is not supported; expected 'e4m3'")
        if block is None:
            return cls(None)
        return cls(checked_block(block))

    def layout(self, path: str, out_features: int, in_features: int, tensors: Tensors) -> FloatLayout | None:
        """Return the layout of the linear at `path`; None if it has a plain weight.

        Raises:
            UnreadableCheckpoint: tensors are missing, or have other shapes or dtypes.
        """
        weight = tensors.get("weight")
        if "weight_scale_inv" not in tensors and (weight is None or weight.element_size() > 1):
            return None
        return float_layout("fp8", path, (out_features, in_features), tensors, "weight_scale_inv", self.block)


def checked_block(block: object) -> tuple[int, int]:
    """Return the block as two sizes.

    Raises:
        UnreadableCheckpoint: it is not two positive integers.
    """
    sizes = list(block) if isinstance(block, list | tuple) else []
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise UnreadableCheckpoint(f"weight_block_size={block!r}: expected [output features, input features]")
    return sizes[0], sizes[1]


def float_layout(
    method: str,
    path: str,
    shape: tuple[int, int],
    tensors: Tensors,
    scale: str,
    block: tuple[int, int] | None,
) -> FloatLayout:
    """Return the layout of a float8 weight of `shape`, with scales per block, or one scale.

    Raises:
        UnreadableCheckpoint: tensors are missing, or have other shapes or dtypes.
    """
    check_tensor(path, "weight", tensors, shape, torch.float8_e4m3fn)
    rows, columns = block or shape
    if block is None and scale in tensors and tensors[scale].numel() == 1:
        check_tensor(path, scale, tensors, tuple(tensors[scale].shape), *_SCALES)
    else:
        blocks = (-(-shape[0] // rows), -(-shape[1] // columns))
        check_tensor(path, scale, tensors, blocks, *_SCALES)

    where = "one scale" if block is None else f"blocks of {rows}x{columns}"
    parts = {name: tensors[name] for name in ("weight", scale)}
    return ScaledFloats(f"{method}, e4m3 in {where}", *shape, parts, scale, rows, columns)
