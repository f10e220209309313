"""The storage format of linears in compressed-tensors checkpoints (llm-compressor, vLLM).

    pack-quantized   weight_packed      int32 [N, K * bits / 32], fields of consecutive input features
                     weight_shape       int64 [2]
                     weight_zero_point  int32 [N * bits / 32, groups], fields of consecutive output features; or int8 [N, groups]
                     weight_g_idx       int [K], the group of each input feature; in older files
    int-quantized,   weight             int8 [N, K]
    naive-quantized  weight_zero_point  int8 [N, groups]
    float-quantized  weight             float8_e4m3fn [N, K]

Fields count from the least integer. All have `weight_scale`: [N, groups], [N, 1] of whole rows, one number, or one for each block.
weight = scale * (q - zero), without a zero where it is symmetric (compressed_tensors/compressors).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_cpu_accel.checkpoints.fp8 import checked_block, float_layout
from hf_cpu_accel.checkpoints.gptq import SCALES
from hf_cpu_accel.checkpoints.layout import (
    IntegerLayout,
    Layout,
    Parts,
    Tensors,
    UnreadableCheckpoint,
    check_tensor,
    unpack_words,
    words_for,
)

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
_STRATEGIES = ("tensor", "channel", "group", "block")
_BITS = (4, 8)  # older versions pack other bits differently


@dataclass(frozen=True, eq=False)
class CompressedTensorsLayout(IntegerLayout):
    """A linear of integers in a compressed-tensors checkpoint.

    Attributes:
        integers: the name of the tensor of integers.
        zeros: the format of the zeros, "packed" or "plain", or None without zeros.
    """

    integers: str
    zeros: str | None

    def check(self, tensors: Tensors) -> None:
        super().check(tensors)
        shape = [self.out_features, self.in_features]
        if "weight_shape" in tensors and tensors["weight_shape"].tolist() != shape:
            raise UnreadableCheckpoint(
                f"weight_shape is {tensors['weight_shape'].tolist()}: expected {shape}"
            )
        most = 2 ** (self.bits - 1)
        for name in {self.integers, *(["weight_zero_point"] if self.zeros == "plain" else [])}:
            values = tensors[name]
            if values.dtype is torch.int8 and not -most <= int(values.min()) <= int(values.max()) < most:
                raise UnreadableCheckpoint(f"{name} contains integers of more than {self.bits} bits")

    def read(self, tensors: Tensors, first: int, last: int) -> Parts:
        q = _unsigned(tensors[self.integers].detach()[first:last], self.bits, self.in_features)
        scale = self._of_rows(tensors["weight_scale"].detach(), first, last)
        if self.zeros is None:
            return Parts(q, scale, torch.full_like(scale, 2 ** (self.bits - 1)))
        zero = tensors["weight_zero_point"].detach()
        if self.zeros == "packed":
            zero = zero.T
        zero = _unsigned(zero, self.bits, self.out_features)
        return Parts(q, scale, self._of_rows(zero.T if self.zeros == "packed" else zero, first, last))

    def _of_rows(self, values: Tensor, first: int, last: int) -> Tensor:
        """Return rows [first, last) of one number or of [N, groups], as float32 [last - first, groups]."""
        if values.shape == (self.out_features, self.groups):
            return values[first:last].float()
        return values.float().reshape(1, 1).expand(last - first, self.groups)


@dataclass(frozen=True)
class Scheme:
    """The quantization of the weights of some linears.

    Attributes:
        targets: names of classes, paths, or patterns after "re:".
        bits, is_float, strategy, group, block, is_symmetric: of the weights.
        activations: the bits of activations in the config; 0 if they are not quantized.
    """

    targets: tuple[str, ...]
    bits: int
    is_float: bool
    strategy: str
    group: int
    block: tuple[int, int] | None
    is_symmetric: bool
    activations: int

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Scheme | None:
        """Read a group of a `quantization_config`; None if its weights are not quantized.

        Raises:
            UnreadableCheckpoint: the weights have a form that is not supported.
        """
        weights, activations = group.get("weights"), group.get("input_activations")
        if weights is None:
            return None
        bits, kind = weights.get("num_bits", 8), str(weights.get("type", "int")).lower()
        size = weights.get("group_size")
        strategy = weights.get("strategy") or _strategy(size)
        if (
            kind not in ("int", "float")
            or not isinstance(bits, int)
            or bits not in _BITS
            or (kind == "float" and bits != 8)
        ):
            raise UnreadableCheckpoint(
                f"compressed-tensors weights of type {kind!r} in {bits!r} bits are not supported; "
                "expected int in 4 or 8 bits, or float in 8"
            )
        if strategy not in _STRATEGIES or (strategy == "group" and (not isinstance(size, int) or size <= 0)):
            raise UnreadableCheckpoint(
                f"compressed-tensors with strategy={strategy!r}, group_size={size!r} is not supported; "
                f"expected one of {', '.join(_STRATEGIES)}"
            )
        return cls(
            tuple(group.get("targets", ())),
            bits,
            kind == "float",
            strategy,
            size if strategy == "group" else 0,
            checked_block(weights.get("block_structure")) if strategy == "block" else None,
            bool(weights.get("symmetric", True)),
            0 if activations is None else int(activations.get("num_bits", 8)),
        )


@dataclass(frozen=True)
class CompressedTensorsCheckpoint:
    """The config of a compressed-tensors checkpoint.

    Attributes:
        schemes: the first matching scheme of a linear applies.
        ignored: linears that are not quantized, see `Scheme.targets`.
        has_cache_scheme: whether the config quantizes the KV cache.
    """

    schemes: tuple[Scheme, ...]
    ignored: tuple[str, ...]
    has_cache_scheme: bool

    marks: ClassVar[tuple[str, ...]] = (
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
    )

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> CompressedTensorsCheckpoint:
        """Read a `quantization_config`.

        Raises:
            UnreadableCheckpoint: the form is not supported.
        """
        groups = config.get("config_groups") or {}
        forms = {config.get("format"), *(group.get("format") for group in groups.values())} - {None}
        sparse = (config.get("sparsity_config") or {}).get("format", "dense")
        for form in sorted(forms - set(_FORMATS)):
            raise UnreadableCheckpoint(
                f"compressed-tensors with format={form!r} is not supported; expected one of {', '.join(_FORMATS)}"
            )
        if sparse != "dense" or (config.get("transform_config") or {}).get("config_groups"):
            raise UnreadableCheckpoint(
                "compressed-tensors with sparse weights or transforms is not supported"
            )
        schemes = tuple(filter(None, map(Scheme.of, groups.values())))
        return cls(schemes, tuple(config.get("ignore") or ()), bool(config.get("kv_cache_scheme")))

    @property
    def not_honored(self) -> tuple[str, ...]:
        asked = {f"activations in {scheme.activations} bits" for scheme in self.schemes if scheme.activations}
        return (*sorted(asked), *(["a quantized KV cache"] if self.has_cache_scheme else ()))

    def layout(self, path: str, out_features: int, in_features: int, tensors: Tensors) -> Layout | None:
        """Return the layout of the linear at `path`; None if it has a plain weight.

        Raises:
            UnreadableCheckpoint: tensors are missing, or have other shapes or dtypes, or the linear has no scheme.
        """
        weight = tensors.get("weight")
        stored = any(name in tensors for name in self.marks)
        if not stored and (weight is None or weight.element_size() > 1):
            return None
        scheme = next((s for s in self.schemes if _matches(path, s.targets)), None)
        if scheme is None or _matches(path, self.ignored, is_linear=False):
            raise UnreadableCheckpoint(
                f"{path} is quantized in the file, but its config has no scheme for it"
            )
        shape = (out_features, in_features)
        if not scheme.is_float:
            return _integers(scheme, path, shape, tensors)
        block = {
            "tensor": None,
            "channel": (1, in_features),
            "group": (1, scheme.group),
            "block": scheme.block,
        }
        return float_layout(
            "compressed-tensors", path, shape, tensors, "weight_scale", block[scheme.strategy]
        )


def _strategy(group_size: object) -> str:
    """Return the strategy of a config without one."""
    if group_size is None:
        return "tensor"
    return "channel" if group_size == -1 else "group"


def _matches(path: str, targets: Sequence[str], *, is_linear: bool = True) -> bool:
    """Return whether a linear is among `targets`."""
    return any(
        re.match(target[3:], path) is not None
        if target.startswith("re:")
        else target == path or (is_linear and target == "Linear")
        for target in targets
    )


def _integers(scheme: Scheme, path: str, shape: tuple[int, int], tensors: Tensors) -> IntegerLayout:
    if scheme.strategy == "block":
        raise UnreadableCheckpoint(
            f"{path}: integers in blocks of output and input features are not supported"
        )
    rows, columns = shape
    bits, group = scheme.bits, scheme.group or columns
    groups, name = -(-columns // group), "weight"
    if "weight_packed" in tensors:
        name = "weight_packed"
        check_tensor(path, name, tensors, (rows, words_for(columns, bits)), torch.int32)
        check_tensor(path, "weight_shape", tensors, (2,), torch.int64, torch.int32)
    else:
        check_tensor(path, name, tensors, shape, torch.int8)
    scales = _scale_shape(scheme, tensors, (rows, groups))
    check_tensor(path, "weight_scale", tensors, scales, *SCALES)
    zeros = None if scheme.is_symmetric else _checked_zeros(path, tensors, scales, bits)
    index = "weight_g_idx" if "weight_g_idx" in tensors else None
    if index is not None:
        check_tensor(path, index, tensors, (columns,), torch.int32, torch.int64)

    names = [name, "weight_scale", *(["weight_shape"] if name == "weight_packed" else [])]
    names += [other for other, exists in (("weight_zero_point", zeros), (index, index)) if exists and other]
    where = {"tensor": "with one scale", "channel": "of whole rows"}
    return CompressedTensorsLayout(
        f"compressed-tensors, {bits} bits {where.get(scheme.strategy, f'in groups of {group}')}",
        rows,
        columns,
        {name: tensors[name] for name in names},
        bits,
        group,
        "weight_scale",
        index,
        name,
        zeros,
    )


def _unsigned(stored: Tensor, bits: int, count: int) -> Tensor:
    """Return signed integers, `count` per row packed in int32 or plain in int8, as uint8 counted from the smallest one."""
    if stored.dtype is torch.int32:
        return unpack_words(stored, bits, count)
    return (stored.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)


def _scale_shape(scheme: Scheme, tensors: Tensors, shape: tuple[int, int]) -> tuple[int, ...]:
    """Return the expected shape: [N, groups], or any shape of one number."""
    scale = tensors.get("weight_scale")
    if scheme.strategy == "tensor" and scale is not None and scale.numel() == 1:
        return tuple(scale.shape)
    return shape


def _checked_zeros(path: str, tensors: Tensors, shape: tuple[int, ...], bits: int) -> str:
    """Check the zeros, and return their format, "packed" or "plain"."""
    zero = tensors.get("weight_zero_point")
    if zero is not None and zero.dtype is torch.int32 and len(shape) == 2:
        check_tensor(path, "weight_zero_point", tensors, (words_for(shape[0], bits), shape[1]), torch.int32)
        return "packed"
    check_tensor(path, "weight_zero_point", tensors, shape, torch.int8)
    return "plain"
