"""The storage format of linears in AWQ checkpoints (AutoAWQ, llm-awq).

    gemm  qweight  int32 [K, N / 8]       eight output features in the order 0 2 4 6 1 3 5 7
          qzeros   int32 [groups, N / 8]  same order
          scales   float [groups, N]
    gemv  qweight  int32 [N, K / 8]       eight input features
          qzeros   int32 [N, W]           eight groups; W is filled up (awq/modules/linear/gemv.py)
          scales   float [N, 8 W]

weight[n, k] = scale * (q - zero), always in 4 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_cpu_accel.checkpoints.gptq import SCALES
from hf_cpu_accel.checkpoints.layout import (
    IntegerLayout,
    Parts,
    Tensors,
    UnreadableCheckpoint,
    check_tensor,
    checked_group,
    unpack_words,
)

_BITS, _PER_WORD = 4, 8
# The field of each of eight output features in a word.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, eq=False)
class AwqLayout(IntegerLayout):
    """A linear in an AWQ checkpoint.

    Attributes:
        is_gemv: whether it has the gemv format, else gemm.
    """

    is_gemv: bool

    def read(self, tensors: Tensors, first: int, last: int) -> Parts:
        q, zero, scale = (tensors[name].detach() for name in ("qweight", "qzeros", "scales"))
        if self.is_gemv:
            rows = unpack_words(q[first:last], self.bits, self.in_features)
            zeros = unpack_words(zero[first:last], self.bits, self.groups)
            return Parts(rows, scale[first:last, : self.groups].float(), zeros.float())
        columns, zeros = (_output_features(words, first, last) for words in (q, zero))
        return Parts(columns.T, scale[:, first:last].T.float(), zeros.T.float())


@dataclass(frozen=True)
class AwqCheckpoint:
    """The config of an AWQ checkpoint.

    Attributes:
        group: the group size of all linears; -1 is a whole row.
        is_gemv: whether it has the gemv format, else gemm.
    """

    group: int
    is_gemv: bool

    marks: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")
    not_honored: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> AwqCheckpoint:
        """Read a `quantization_config`.

        Raises:
            UnreadableCheckpoint: the bits or the format are not supported.
        """
        bits = config.get("bits", config.get("w_bit", _BITS))
        group = config.get("group_size", config.get("q_group_size", 128))
        form = str(config.get("version") or config.get("format") or "gemm").lower()
        if bits != _BITS:
            raise UnreadableCheckpoint(f"AWQ with bits={bits!r} is not supported; expected 4")
        if form not in ("gemm", "gemv"):
            raise UnreadableCheckpoint(
                f"AWQ with version={form!r} is not supported; expected 'gemm' or 'gemv'"
            )
        return cls(checked_group("AWQ", group), form == "gemv")

    def layout(
        self, path: str, out_features: int, in_features: int, tensors: Tensors
    ) -> IntegerLayout | None:
        """Return the layout of the linear at `path`; None if it has a plain weight.

        Raises:
            UnreadableCheckpoint: tensors are missing, or have other shapes or dtypes.
        """
        if not any(name in tensors for name in self.marks):
            return None
        group = in_features if self.group == -1 else self.group
        groups = -(-in_features // group)
        packed = in_features if self.is_gemv else out_features
        if packed % _PER_WORD:
            raise UnreadableCheckpoint(f"{path}: {packed} features do not fill whole 32-bit words")
        if self.is_gemv:
            width = _gemv_width(in_features, group)
            shapes = [(out_features, in_features // _PER_WORD), (out_features, width)]
            shapes.append((out_features, width * _PER_WORD))
        else:
            words = out_features // _PER_WORD
            shapes = [(in_features, words), (groups, words), (groups, out_features)]
        for name, shape, dtypes in zip(
            self.marks, shapes, ((torch.int32,), (torch.int32,), SCALES), strict=True
        ):
            check_tensor(path, name, tensors, shape, *dtypes)

        return AwqLayout(
            f"AWQ, 4 bits in groups of {group}",
            out_features,
            in_features,
            {name: tensors[name] for name in self.marks},
            _BITS,
            group,
            "scales",
            None,
            self.is_gemv,
        )


def _output_features(words: Tensor, first: int, last: int) -> Tensor:
    """Return fields [first, last) of words [rows, N / 8], uint8 [rows, last - first]; `first` is the first field of a word."""
    part = words[:, first // _PER_WORD : -(-last // _PER_WORD)]
    stored = unpack_words(part, _BITS, part.shape[1] * _PER_WORD)
    fields = stored.view(len(words), -1, _PER_WORD)[..., list(_PLACES)]
    return fields.reshape(len(words), -1)[:, : last - first]


def _gemv_width(in_features: int, group: int) -> int:
    """Return the number of words of zeros in a row, with the padding of AutoAWQ."""
    multiple = max(1, 128 // group)
    words = -(-(in_features // group) // _PER_WORD)
    return -(-words // multiple) * multiple
