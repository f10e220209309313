"""The storage format of linears in GPTQ checkpoints (AutoGPTQ, GPTQModel, Optimum).

    qweight  int32 [K * bits / 32, N]       fields of consecutive input features
    qzeros   int32 [groups, N * bits / 32]  fields of consecutive output features
    scales   float [groups, N]
    g_idx    int32 [K]                      the group of each input feature; not in all files

weight[n, k] = scales[g, n] * (q[k, n] - zero[g, n]). The format "gptq" stores zero - 1, and its readers add 1 to whole words.
"gptq_v2" stores zero (gptqmodel/utils/model.py, gptqmodel/nn_modules/qlinear/__init__.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_cpu_accel.checkpoints.layout import (
    IntegerLayout,
    Parts,
    Tensors,
    UnreadableCheckpoint,
    check_tensor,
    checked_group,
    unpack_words,
    words_for,
)

BITS = (2, 3, 4, 8)
SCALES = (torch.float16, torch.bfloat16, torch.float32)
# Added to words of zeros of the format "gptq". Fields of 3 bits cross words, so 1 is added after unpacking.
_ONE_IN_EACH_FIELD = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True, eq=False)
class GptqLayout(IntegerLayout):
    """A linear in a GPTQ checkpoint.

    Attributes:
        zeros_less_one: whether the format is "gptq", which stores zero - 1.
    """

    zeros_less_one: bool

    def read(self, tensors: Tensors, first: int, last: int) -> Parts:
        words, zeros, scale = (tensors[name].detach() for name in ("qweight", "qzeros", "scales"))
        q = unpack_words(words[:, first:last].T, self.bits, self.in_features)
        return Parts(q, scale[:, first:last].T.float(), self._zeros(zeros)[:, first:last].T.float())

    def _zeros(self, words: Tensor) -> Tensor:
        if self.zeros_less_one and self.bits != 3:
            words = words + _ONE_IN_EACH_FIELD[self.bits]
        zeros = unpack_words(words, self.bits, self.out_features)
        return zeros + 1 & 7 if self.zeros_less_one and self.bits == 3 else zeros


@dataclass(frozen=True)
class GptqCheckpoint:
    """The config of a GPTQ checkpoint.

    Attributes:
        bits, group: of all linears without exceptions; a group of -1 is a whole row.
        zeros_less_one: whether the format is "gptq", which stores zero - 1.
        has_order: whether input features are ordered by activation, so that each linear needs g_idx.
        has_exceptions: whether single linears may have other bits and groups.
    """

    bits: int
    group: int
    zeros_less_one: bool
    has_order: bool
    has_exceptions: bool

    marks: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales", "g_idx")
    not_honored: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> GptqCheckpoint:
        """Read a `quantization_config`.

        Raises:
            UnreadableCheckpoint: the bits or the format are not supported.
        """
        bits, group = config.get("bits"), config.get("group_size", 128)
        form = config.get("checkpoint_format") or config.get("format") or "gptq"
        if not isinstance(bits, int) or bits not in BITS:
            raise UnreadableCheckpoint(
                f"GPTQ with bits={bits!r} is not supported; expected one of {', '.join(map(str, BITS))}"
            )
        if form not in ("gptq", "gptq_v2"):
            raise UnreadableCheckpoint(
                f"GPTQ with checkpoint_format={form!r} is not supported; expected 'gptq' or 'gptq_v2'"
            )
        group = checked_group("GPTQ", group)
        return cls(bits, group, form == "gptq", bool(config.get("desc_act")), bool(config.get("dynamic")))

    def layout(
        self, path: str, out_features: int, in_features: int, tensors: Tensors
    ) -> IntegerLayout | None:
        """Return the layout of the linear at `path`; None if it has a plain weight.

        Raises:
            UnreadableCheckpoint: tensors are missing, or have other shapes or dtypes.
        """
        if not any(name in tensors for name in self.marks):
            return None
        bits, group = self.bits, in_features if self.group == -1 else self.group
        if self.has_exceptions:
            bits, group = _as_stored(path, in_features, tensors)
        if bits == 3 and (in_features % 32 or out_features % 32):
            raise UnreadableCheckpoint(
                f"{path}: {out_features} x {in_features} in 3 bits does not fill whole 32-bit words"
            )
        groups = -(-in_features // group)
        check_tensor(path, "qweight", tensors, (words_for(in_features, bits), out_features), torch.int32)
        check_tensor(path, "qzeros", tensors, (groups, words_for(out_features, bits)), torch.int32)
        check_tensor(path, "scales", tensors, (groups, out_features), *SCALES)
        has_index = "g_idx" in tensors and tensors["g_idx"].numel() > 0
        if has_index or self.has_order:
            check_tensor(path, "g_idx", tensors, (in_features,), torch.int32, torch.int64)

        return GptqLayout(
            f"GPTQ, {bits} bits in groups of {group}",
            out_features,
            in_features,
            {name: tensors[name] for name in self.marks if name in tensors},
            bits,
            group,
            "scales",
            "g_idx" if has_index else None,
            self.zeros_less_one,
        )


def _as_stored(path: str, in_features: int, tensors: Tensors) -> tuple[int, int]:
    """Return the bits and group of a linear from the shapes of its tensors."""
    words, groups = (tensors[name].shape[0] if name in tensors else 0 for name in ("qweight", "scales"))
    bits = words * 32 // in_features
    if bits not in BITS or groups <= 0 or in_features % groups:
        raise UnreadableCheckpoint(
            f"{path}: {words} words and {groups} groups for {in_features} input features are not a GPTQ weight"
        )
    return bits, in_features // groups
