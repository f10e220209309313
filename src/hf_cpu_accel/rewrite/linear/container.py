"""Base class of fused modules that replace a container."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from hf_cpu_accel.patching.fused_module import FusedModuleMixin, Reference, mixed_class
from hf_cpu_accel.patching.hooks import carried_attributes, forward_hooks, share_hooks
from hf_cpu_accel.providers.route import Route
from hf_cpu_accel.rewrite.linear.layer import PackedLinear


class FusedContainer(FusedModuleMixin):
    """Has the children of `original` under their names, with `packed` in place of some, and its plain attributes.

    So paths, `state_dict` keys and indexing (of a Sequential) stay the same.

    Attributes:
        inputs: the names of the inputs of the original's forward, for callers that pass them by name.
        provider_route: computes the linears with the fused ops, on the op of this package or by another provider.
    """

    provider_route: Route

    def __init__(
        self, original: nn.Module, packed: Mapping[str, PackedLinear], inputs: tuple[str, ...]
    ) -> None:
        super().__init__()
        own = set(vars(self))
        for name, value in carried_attributes(original).items():
            if name not in own:
                setattr(self, name, value)
        for name, child in original.named_children():
            inner = packed.get(name, child)
            self.add_module(name, inner)
            share_hooks(child, inner)
        self.inputs = inputs
        self.training = False
        self.__class__ = mixed_class(type(self), type(original))  # type: ignore[assignment]
        inside = [child for child in self.modules() if child is not self]
        self._hooks_inside = tuple(hooks for child in inside for hooks in forward_hooks(child))

    def reference_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reference | None:
        return Reference(args, kwargs)

    def bind(self, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the inputs in the order of the original's forward."""
        if not kwargs:
            return args
        return args + tuple(kwargs[name] for name in self.inputs[len(args) :])

    @abstractmethod
    def make_route(self) -> Route:
        """Return the route over the packed children. Call it after they, and attributes of a subclass, are set."""

    def __getstate__(self) -> dict[str, Any]:
        # A copy routes over its own children, and other providers' weights cannot be copied.
        return {name: value for name, value in self.__dict__.items() if name != "provider_route"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.provider_route = self.make_route()

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
