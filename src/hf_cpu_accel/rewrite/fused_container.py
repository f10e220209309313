"""What fused modules that stand for a container have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from hf_cpu_accel.rewrite.mixed_class import Mixed, mixed_class
from hf_cpu_accel.rewrite.packed_linear import PackedLinear


class FusedContainer(Mixed):
    """Has the children of `original` under their names, with `packed` in place of some, and its plain attributes.

    So paths, `state_dict` keys and indexing (of a Sequential) stay what they were.

    Attributes:
        inputs: the names of the inputs of the original's forward, for callers that pass them by name.
    """

    def __init__(
        self, original: nn.Module, packed: Mapping[str, PackedLinear], inputs: tuple[str, ...]
    ) -> None:
        super().__init__()
        for name, value in vars(original).items():
            if not name.startswith("_"):
                setattr(self, name, value)
        for name, child in original.named_children():
            self.add_module(name, packed.get(name, child))
        self.inputs = inputs
        self.training = False
        self.__class__ = mixed_class(type(self), type(original))  # type: ignore[assignment]

    def bind(self, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """The inputs in the order of the original's forward."""
        if not kwargs:
            return args
        return args + tuple(kwargs[name] for name in self.inputs[len(args) :])

    def packed_child(self, name: str) -> PackedLinear:
        child = self._modules[name]
        assert isinstance(child, PackedLinear)
        return child

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, index: int) -> nn.Module:
        return list(self.children())[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return self.children()
