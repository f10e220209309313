"""Capture the ops of one decode step, below autograd, with their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hf_cpu_accel.generate.host_layers import StoredTokens
from hf_cpu_accel.generate.replay.cached_layers import CachedLayers, Concatenated
from hf_cpu_accel.generate.replay.sources import CannotReplay, Name, Past
from hf_cpu_accel.lazy.lazy_tensor import LazyTensor, ordinary_arguments
from hf_cpu_accel.runtime.torch_modes import AroundAllOps, AroundFunctions

# They read values without an op, and Python may use them differently in the next step.
_READERS = frozenset((Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__))
_MOST_BYTES = 128 << 20
MADE_BY_PYTHON = torch.ops.aten.lift_fresh.default  # its input is a tensor of Python numbers
_ORDINARY = type(MADE_BY_PYTHON)  # ops without other ops inside
_DECODER_LAYERS = torch.ops.hf_cpu_accel.decoder_layers.default
_KEYS, _PAST = 5, 7  # among its arguments


@dataclass(frozen=True)
class Op:
    """An op, its arguments and its output."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    def written(self) -> list[Tensor]:
        """Return the tensors among the arguments that the op writes to."""
        arguments = self.func._schema.arguments
        given = [(argument, value) for argument, value in zip(arguments, self.args, strict=False)]
        given += [
            (argument, self.kwargs[argument.name]) for argument in arguments if argument.name in self.kwargs
        ]
        written = [value for argument, value in given if argument.is_write]
        return [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]


@dataclass
class Capture:
    """One decode step.

    Attributes:
        ops: in their order.
        names: names of tensors in every step, by id: ("input", name), ("output", number of the op, place in its output), or the
            contents of a cache layer: ("keys", layer), ("values", layer), ("rows", layer) or ("encoder_sequences", layer). A
                tensor
            without a name comes from outside.
        sizes: of the inputs.
        new_tokens: how many each sequence gets.
        written: the cache layers that got them, by index, with their contents now.
        put: the cache layers with new keys and values instead, by index, with the names of these two.
        seen: how many tokens each layer in `written` and `put` has seen with these.
        logits: the output of the step.
        bytes: size of the outputs of the ops, which are kept.
    """

    ops: list[Op] = field(default_factory=list)
    names: dict[int, Name] = field(default_factory=dict)
    sizes: dict[str, torch.Size] = field(default_factory=dict)
    new_tokens: int = 1
    written: dict[int, StoredTokens] = field(default_factory=dict)
    put: dict[int, tuple[Name, Name]] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    logits: Any = None
    bytes: int = 0

    def name_of(self, tensor: Tensor) -> Name | None:
        return self.names.get(id(tensor))

    def writes_outside(self) -> bool:
        """Return whether an op writes to anything but tensors of the step and storages of keys and values: to a recurrent state."""
        reads = [
            leaf for op in self.ops for leaf in tree_leaves((op.args, op.kwargs)) if isinstance(leaf, Tensor)
        ]
        outside = {_memory(leaf) for leaf in reads if self.name_of(leaf) is None}
        return any(_memory(leaf) in outside for op in self.ops for leaf in op.written())


def capture(
    model: Callable[..., Any], inputs: Mapping[str, Any], layers: CachedLayers, new_tokens: int = 1
) -> tuple[Any, Capture | CannotReplay]:
    """Return the output of `model(**inputs, return_dict=True)`, and the ops of that call, or why they cannot be replayed."""
    captured = Capture(new_tokens=new_tokens)
    refusals: list[str] = []

    def around_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(func, _ORDINARY):
            refusals.append(f"{func} runs ops inside")
            return func(*args, **kwargs)
        if any(isinstance(leaf, LazyTensor) for leaf in tree_leaves((args, kwargs))):
            with AroundAllOps(around_op):  # their own ops come first
                args, kwargs = ordinary_arguments(func, args, kwargs)
        output = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            refusals.append(f"{func} draws random numbers")
        if _counts_values(func, args):
            refusals.append(f"the output shape of {func} depends on values")
        if not func.is_view:
            captured.bytes += sum(leaf.nbytes for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        if captured.bytes > _MOST_BYTES:
            refusals.append("its tensors are large, so replaying saves no time")
        if refusals:
            captured.ops.clear()
            return output
        if func is MADE_BY_PYTHON:  # it returns its argument
            args = (output.clone(),)
        captured.ops.append(Op(func, args, kwargs, output))
        return output

    def around_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _READERS:
            refusals.append(f"{func.__name__} reads tensor values")
        return func(*args, **kwargs)

    before, joined = layers.held(), layers.concatenated()
    with AroundFunctions(around_function), AroundAllOps(around_op):
        outputs = model(**inputs, return_dict=True)
    if refusals:
        return outputs, CannotReplay(refusals[0])
    captured.logits = outputs.logits
    held = layers.held()
    _name(captured, inputs, held, joined)
    for index, sequences in layers.encoder_sequences().items():  # mostly the same for all layers
        captured.names.setdefault(id(sequences), ("encoder_sequences", index))
    try:
        _find_written(captured, before, held)
        _find_put(captured, joined, layers.concatenated())
    except CannotReplay as refusal:
        return outputs, refusal
    return outputs, captured


def _name(
    captured: Capture,
    inputs: Mapping[str, Any],
    held: dict[int, StoredTokens],
    joined: dict[int, Concatenated],
) -> None:
    names = captured.names
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            names[id(value)] = ("input", name)
            captured.sizes[name] = value.shape
    for index, layer in held.items():
        names[id(layer.key_storage)] = ("keys", index)
        names[id(layer.value_storage)] = ("values", index)
        if layer.rows is not None:
            names.setdefault(id(layer.rows), ("rows", index))
    for index, before in joined.items():
        names[id(before.keys)] = ("keys", index)
        names[id(before.values)] = ("values", index)
    for number, op in enumerate(captured.ops):
        given = {
            id(leaf) for leaf in tree_leaves((op.args, op.kwargs))
        }  # an in-place op returns its argument
        for place, leaf in enumerate(tree_leaves(op.output)):
            if isinstance(leaf, Tensor) and id(leaf) not in given:
                names.setdefault(id(leaf), ("output", number, place))


def _find_written(captured: Capture, before: dict[int, StoredTokens], held: dict[int, StoredTokens]) -> None:
    """Find the layers that got the new tokens; their lengths become `Past` in the arguments of fused layers.

    Raises:
        CannotReplay: the layers got another number of tokens.
    """
    for number, op in enumerate(captured.ops):
        if op.func is not _DECODER_LAYERS:
            continue
        past: list[Any] = list(op.args[_PAST])
        for place, keys in enumerate(op.args[_KEYS]):
            name = captured.name_of(keys)
            if name is not None and name[0] == "keys":
                layer = held[name[1]]
                if past[place] != layer.seen - layer.dropped - captured.new_tokens:
                    raise CannotReplay("a layer reads tokens that are not in its cache")
                past[place] = Past(("past", name[1]))
        args = (*op.args[:_PAST], past, *op.args[_PAST + 1 :])
        captured.ops[number] = Op(op.func, args, op.kwargs, op.output)
    for index, layer in held.items():
        seen = before[index].seen if index in before else 0
        if layer.seen not in (seen, seen + captured.new_tokens) or (index not in before and layer.seen):
            raise CannotReplay("tokens other than the new ones were added to its cache")
        if layer.seen != seen:
            captured.written[index] = layer
            captured.seen.add(layer.seen)


def _find_put(captured: Capture, before: dict[int, Concatenated], joined: dict[int, Concatenated]) -> None:
    """Find the layers with new keys and values.

    Raises:
        CannotReplay: they have another number of new tokens, or no captured op created them.
    """
    for index, layer in joined.items():
        if index not in before:
            raise CannotReplay("a layer of its cache was empty before this step")
        if layer.keys is before[index].keys and layer.values is before[index].values:
            continue
        keys, values = captured.name_of(layer.keys), captured.name_of(layer.values)
        if layer.seen != before[index].seen + captured.new_tokens or keys is None or values is None:
            raise CannotReplay("tokens other than the new ones were added to its cache")
        captured.put[index] = keys, values
        captured.seen.add(layer.seen)


def _counts_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether the output shape of an op depends on values, which Python code may use."""
    if func is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.dynamic_output_shape in func.tags


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
