"""`PackedExperts`, the replacement of a module of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.lazy.lazy_weight import LazyWeight
from hf_cpu_accel.ops.experts import ExpertWeights, experts_ffn
from hf_cpu_accel.packing.linear import PackedWeight
from hf_cpu_accel.packing.saved_weight import SavedWeight
from hf_cpu_accel.patching.accelerated_module import SavedParameter
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, empty
from hf_cpu_accel.patching.hooks import carried_attributes, forward_hooks
from hf_cpu_accel.rewrite.core.packed_module import changed_dtype, check_inference, loading_refused
from hf_cpu_accel.rewrite.core.packed_source import saved_weight
from hf_cpu_accel.rewrite.experts.form import ExpertsForm, Stack


class PackedExperts(FusedModuleMixin):
    """Mixed into the class of a module of experts by `pack_experts`: attributes, children and biases are those of the original.

    forward: hidden states [T, C], expert indices [T, k], expert weights [T, k] -> [T, C].

    The packed weights are neither parameters nor buffers, as in `PackedLinear`; under their names `state_dict()` and attributes
    have dequantized values.

    Attributes:
        form: the form of the original.
        packed: the weights by the names of their parameters.
        weight_dtype: dtype of the weights for other code; follows `model.to(dtype)`.
        rule: the name of the rule that created it.
    """

    copies_parameters = True
    form: ExpertsForm
    packed: dict[str, PackedWeight]
    weight_dtype: torch.dtype
    rule: str = ""
    _names: tuple[str, ...]
    _experts: int
    _weights: ExpertWeights | None
    _values: dict[str, dict[torch.dtype, Tensor]]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.is_watched:
            try:
                return self._original_class.forward(self, *args, **kwargs)
            finally:
                self._values = {}  # unpacked experts of one layer, which must not accumulate over the layers
        hidden_states, index, weights = (*args, *(kwargs[name] for name in self.form.inputs[len(args) :]))
        check_inference(self, hidden_states)
        return experts_ffn(hidden_states, index, weights, self.weights)

    @property
    def weights(self) -> ExpertWeights:
        """Return the experts for the op, with current biases."""
        if self._weights is None:
            form = self.form
            up, down = (self.packed[stack.name] for stack in form.stacks())
            self._weights = form.weights(up, down, self, self._experts)
        return self._weights

    def unpack(self, stack: Stack) -> Tensor:
        """Return the dequantized parameter, in the shape and dtype of the original."""
        return stack.unpack(self.packed[stack.name], self._experts, self.weight_dtype)

    def keep_originals(self, parameters: dict[str, nn.Parameter]) -> None:
        """Keep the originals beside the packed weights; `state_dict()` then has their exact values."""
        held = {**self._parameters, **parameters}
        self._parameters = {name: held[name] for name in self._names}

    def __getattr__(self, name: str) -> Any:
        stack = next((stack for stack in self.__dict__["form"].stacks() if stack.name == name), None)
        if stack is None or name in self._parameters:
            return super().__getattr__(name)
        return self._weight(stack, self._values.setdefault(name, {}))

    def whole_parameters(self) -> dict[str, Tensor | None]:
        """Return the parameters under their original names; packed ones are `LazyWeight`s, which store no values."""
        packed = {stack.name: self._weight(stack, {}) for stack in self.form.stacks()}
        return {name: self._parameters.get(name, packed.get(name)) for name in self._names}

    def _weight(self, stack: Stack, memo: dict[torch.dtype, Tensor]) -> LazyWeight:
        packed, experts = self.packed[stack.name], self._experts
        matrix = (packed.out_features // experts, packed.in_features)
        shape = (experts, *(matrix[::-1] if stack.transposed else matrix))
        return LazyWeight(shape, self.weight_dtype, lambda: self.unpack(stack), memo)

    def saved_parameters(self) -> Iterator[SavedParameter]:
        for name, packed in self.packed.items():
            yield SavedParameter(name, partial(SavedWeight, self.rule, packed=packed), group=packed)

    def extra_repr(self) -> str:
        weights = self.weights
        return (
            f"experts={weights.experts}, features={weights.features}, intermediate_features={weights.intermediate_features}, "
            f"activation={weights.activation}, gated={weights.gated}, packed={weights.up.dtype}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedExperts:
        self.weight_dtype = changed_dtype(self.weight_dtype, fn)
        super()._apply(fn, recurse)
        self.forget()
        return self

    def forget(self) -> None:
        """Forget derived values. Call it after biases are cast or replaced."""
        self._weights, self._values = None, {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_weights": None, "_values": {}}  # derived from the other attributes

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        stacks = {stack.name: stack for stack in self.form.stacks()}
        for name in self._names:
            key = prefix + name
            destination[key] = destination.pop(key) if key in destination else self.unpack(stacks[name])

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise loading_refused()


@dataclass(frozen=True)
class PackedStack:
    """One of the parameters of `module`, for the journal.

    Attributes:
        is_of_linears: whether its file has a linear for each expert.
    """

    module: PackedExperts
    stack: Stack
    is_of_linears: bool = False

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.module.weight_dtype

    def parameter_place(self) -> tuple[nn.Module, str]:
        return self.module, self.stack.name

    def unpack(self) -> Tensor:
        return self.module.unpack(self.stack)


def pack_experts(original: nn.Module, form: ExpertsForm, dtype: str, int4_group: int) -> PackedExperts:
    """Return a packed replacement for `original`, which is not changed."""
    parameters: dict[str, nn.Parameter] = dict(original._parameters)  # type: ignore[arg-type]
    stacks = {stack.name: parameters.pop(stack.name) for stack in form.stacks()}
    packed = {}
    for stack in form.stacks():
        saved = saved_weight(stacks[stack.name])
        packed[stack.name] = (
            stack.pack(stacks[stack.name].detach(), dtype, int4_group) if saved is None else saved.packed
        )
    module = empty(PackedExperts, type(original))
    assert isinstance(module, PackedExperts)
    module.__dict__.update(carried_attributes(original))
    first = stacks[form.up.name]
    module.__dict__.update(
        _modules=dict(original._modules),
        _parameters=parameters,
        form=form,
        packed=packed,
        weight_dtype=first.dtype,
        _names=tuple(original._parameters),
        _experts=len(first),
        _hooks_inside=tuple(hooks for child in original.children() for hooks in forward_hooks(child)),
        _weights=None,
        _values={},
    )
    return module
