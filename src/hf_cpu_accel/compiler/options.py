"""The options and modes of the backend, `torch.compile(..., options=..., mode=...)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_cpu_accel.compiler import torch_private
from hf_cpu_accel.compiler.passes import PASSES
from hf_cpu_accel.packing.linear import DTYPES

# torch's modes. All do the same here. Inductor's `cpp_wrapper` (no Python between kernels) gained nothing on BERT-base and
# ResNet-50 and at most 2 % on MiniLM, and took a third to a half longer to compile. Inductor's templates for matrix products are
# slower than packed weights on CPUs without AMX.
MODES = ("default", "reduce-overhead", "max-autotune")


@dataclass(frozen=True)
class Options:
    """Settings of one compilation.

    Args:
        dtype: the dtype of packed weights, one of `packing.DTYPES`, or None for the dtype of each weight.
        skip_passes: names of passes to skip, see `passes.PASSES`.
        inductor: settings of `torch._inductor.config` for these graphs only.

    Raises:
        ValueError: a value that is not accepted.
        TypeError: a value of the wrong type.
    """

    dtype: str | None = None
    skip_passes: tuple[str, ...] = ()
    inductor: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"options: dtype={self.dtype!r}: expected None or one of {_listed(DTYPES)}")
        if isinstance(self.skip_passes, str) or not isinstance(self.skip_passes, list | tuple):
            raise TypeError(f"options: skip_passes={self.skip_passes!r}: expected a tuple of names")
        for name in self.skip_passes:
            if name not in PASSES:
                raise ValueError(
                    f"options: skip_passes contains {name!r}: expected names of passes: {_listed(PASSES)}"
                )
        if not isinstance(self.inductor, Mapping):
            raise TypeError(f"options: inductor={self.inductor!r}: expected a dict of settings")
        for name in self.inductor:
            _check_setting(name)

    @classmethod
    def of(cls, options: Mapping[str, Any] | None, mode: str | None) -> Options:
        """Return the settings for the arguments of `torch.compile`.

        Raises:
            ValueError: an unknown option or mode, or a value that is not accepted.
            TypeError: a value of the wrong type.
        """
        if mode is not None and mode not in MODES:
            raise ValueError(f"mode={mode!r}: expected one of {_listed(MODES)}")
        names = [field.name for field in dataclasses.fields(cls)]
        options = {} if options is None else options
        unknown = sorted(set(options) - set(names))
        if unknown:
            raise ValueError(
                f"options: {unknown[0]!r} is unknown; expected {_listed(names)}. "
                "Pass settings of Inductor as options={'inductor': {...}}"
            )
        return cls(**options)


def _check_setting(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"options: inductor contains the key {name!r}: expected the name of a setting")
    if name == "freezing":
        # Freezing must be on while Dynamo traces, and turns off both caches of compiled graphs.
        raise ValueError(
            "options: inductor: freezing is not supported; remove it, weights are packed without it"
        )
    try:
        torch_private.inductor_default(name)
    except AttributeError:
        raise ValueError(f"options: inductor: {name!r} is not a setting of torch._inductor.config") from None


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
