"""The copies of a packed weight for other providers."""

from __future__ import annotations

import weakref

import psutil
from torch import Tensor

from hf_cpu_accel.packing.linear import PackedWeight, unpack_values
from hf_cpu_accel.providers.torch_ops import Provider, ProviderWeight
from hf_cpu_accel.runtime import cgroup, hardware

# This share of the memory stays free; a copy that would use it raises MemoryError.
_KEEP_FREE = 0.1


class Copies:
    """The copies of one packed weight, one per provider, as long as they are used.

    They cannot be copied or pickled (oneDNN's tensors are opaque); the owner creates a new `Copies` instead.
    """

    def __init__(self, packed: PackedWeight) -> None:
        self._packed = packed
        self._values: weakref.ref[Tensor] | None = None
        self._by_provider: weakref.WeakValueDictionary[str, ProviderWeight] = weakref.WeakValueDictionary()

    def of(self, provider: Provider) -> ProviderWeight:
        """Return the copy of `provider`, creating it if needed.

        Raises:
            MemoryError: too little memory would be left.
        """
        weight = self._by_provider.get(provider.name)
        if weight is None:
            _check_room(4 * self._packed.in_features * self._packed.out_features)
            weight = self._by_provider[provider.name] = provider.prepare(self._packed, self._unpacked())
        return weight

    def _unpacked(self) -> Tensor:
        """Return the unpacked values, cached while a copy uses them: unpacking takes longer than a round of measuring."""
        values = None if self._values is None else self._values()
        if values is None:
            values = unpack_values(self._packed)
            self._values = weakref.ref(values)
        return values

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self._by_provider.values())


def _check_room(nbytes: int) -> None:
    cpu = hardware.detect()
    whole = cpu.memory_total if cpu.cgroup_memory_limit is None else cpu.cgroup_memory_limit
    available = psutil.virtual_memory().available
    headroom = cgroup.memory_headroom()
    available = available if headroom is None else min(available, headroom)
    if available - nbytes < _KEEP_FREE * whole:
        raise MemoryError(
            f"a copy of {nbytes / 1e6:.0f} MB does not fit: {available / 1e6:.0f} of {whole / 1e6:.0f} MB are free"
        )
