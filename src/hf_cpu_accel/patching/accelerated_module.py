"""Base class of the modules that this package puts into a model: what other code asks about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from hf_cpu_accel.packing.saved_weight import SavedWeight


@dataclass(frozen=True)
class CopiedParameter:
    """A parameter or buffer from which a module derived values, so that writes to it do not take effect by themselves.

    Attributes:
        holder: the dictionary of its module that holds it.
        name: its name there.
        is_packed: whether packed weights were made from it, which cannot be packed again.
    """

    holder: dict[str, Any]
    name: str
    is_packed: bool = False


@dataclass(frozen=True)
class SavedParameter:
    """A parameter of a module as part of a packed weight that a packed folder stores.

    Attributes:
        name: the name of the parameter.
        weight: returns the packed weight, given the paths of all parameters in it.
        group: what these parameters have in common, compared by identity; `index` is the place of this one among them.
    """

    name: str
    weight: Callable[[tuple[str, ...]], SavedWeight]
    group: object
    index: int = 0


class AcceleratedModule(nn.Module):
    """Base class of modules that replace a module, or fuse the modules inside of one.

    Attributes:
        reads_parameters: whether its forward reads parameters of the modules inside without calling these modules, so that
            replacing a parameter must be detected.
        copies_parameters: whether it derives values from all parameters, its own and those of modules inside.
        packs_parameters: whether packed weights are made from all these, and from buffers.
    """

    reads_parameters: ClassVar[bool] = False
    copies_parameters: bool = False
    packs_parameters: bool = False

    def copied_parameters(self) -> Iterator[CopiedParameter]:
        """Yield the parameters and buffers, its own and those of modules inside, from which it derives values.

        `_apply` computes these values again. Kernels read most biases and gains in place, so by default there are none but by
        `copies_parameters` and `packs_parameters`.
        """
        for module in self.modules() if self.copies_parameters or self.packs_parameters else ():
            yield from copies_of(module, is_packed=self.packs_parameters)

    def saved_parameters(self) -> Iterator[SavedParameter]:
        """Yield its own parameters that packed folders store in packed form. By default there are none."""
        return iter(())

    def kept_parameters(self) -> Mapping[str, Tensor | None]:
        """Return its own parameters in their original form, without packed ones. By default these are the registered ones."""
        return self._parameters


def copies_of(module: nn.Module, *, is_packed: bool = False) -> Iterator[CopiedParameter]:
    """Yield all parameters of the module itself; with `is_packed`, its buffers, too."""
    for holder in (module._parameters, module._buffers) if is_packed else (module._parameters,):
        yield from (CopiedParameter(holder, name, is_packed) for name in holder)
