"""The common form of all decode steps with as many new tokens: a list of ops that computes logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hf_cpu_accel.generate.host_layers import KeyValueStorage
from hf_cpu_accel.generate.replay.cached_layers import CachedLayers
from hf_cpu_accel.generate.replay.capture import MADE_BY_PYTHON, Capture, Op
from hf_cpu_accel.generate.replay.sources import CannotReplay, Name, Source, growth, source_of

_ATEN = torch.ops.aten
_EMPTY = frozenset(
    (_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided)
)
_OF_CACHE = frozenset(("keys", "values", "rows"))


@dataclass(frozen=True)
class Step:
    """One op.

    Attributes:
        outputs: the names of its outputs, if there are tensors among them.
        answer: its output if that is no tensor; the step is valid only while it stays equal.
        writes: whether it writes to some of its arguments.
    """

    func: Any
    args: tuple[Source, ...]
    kwargs: dict[str, Source]
    outputs: tuple[Name, ...]
    answer: Any
    writes: bool

    @property
    def reads(self) -> set[Name]:
        return {name for source in (*self.args, *self.kwargs.values()) for name in source.reads}

    @property
    def is_check(self) -> bool:
        """Return whether the op only returns a condition, for example whether weights still have the same values."""
        return not self.outputs and not self.writes

    def take(self, known: dict[Name, Any], tokens: int) -> bool:
        """Call the op; return False if its answer differs."""
        output = self.func(
            *[source.value(known, tokens) for source in self.args],
            **{name: source.value(known, tokens) for name, source in self.kwargs.items()},
        )
        if isinstance(output, Tensor):
            known[self.outputs[0]] = output
            return True
        if self.outputs:
            known.update(zip(self.outputs, tree_leaves(output), strict=True))
            return True
        return self.writes or (type(output) is type(self.answer) and output == self.answer)

    def is_of(self, op: Op, captured: Capture, tokens: int) -> bool:
        """Return whether this step equals the op of a captured step."""
        return (
            self.func is op.func
            and len(self.args) == len(op.args)
            and self.kwargs.keys() == op.kwargs.keys()
            and all(
                source.is_source_of(value, captured.name_of, tokens)
                for source, value in (
                    *zip(self.args, op.args, strict=True),
                    *((source, op.kwargs[name]) for name, source in self.kwargs.items()),
                )
            )
        )


class Program:
    """The ops of all steps from the two captured ones on.

    Args:
        first, second: two steps, the first one before the second.
        apart: how many tokens longer the text was in the second one.

    Raises:
        CannotReplay: they do not determine the next one.
    """

    def __init__(self, first: Capture, second: Capture, apart: int, layers: CachedLayers) -> None:
        if [op.func for op in first.ops] != [op.func for op in second.ops]:
            raise CannotReplay("its ops change between steps")
        self._all = [_step(number, first, second, apart) for number in range(len(first.ops))]
        logits = first.name_of(first.logits)
        if logits is None or logits[0] != "output" or logits != second.name_of(second.logits):
            raise CannotReplay("its logits do not come from a captured op")
        self._logits = logits
        self._put = first.put
        if first.put != second.put:
            raise CannotReplay("the cache layers that get new keys change between steps")
        kept = {name for names in first.put.values() for name in names}
        live = _live(self._all, {logits, *kept})
        # Checks that need no other step come first.
        self._steps = sorted(live, key=lambda step: not (step.is_check and not step.reads))
        self._first_write = next((n for n, step in enumerate(self._steps) if step.writes), len(live))
        self.is_repeatable = not second.writes_outside()
        if not self.is_repeatable and any(step.is_check for step in self._steps[self._first_write :]):
            raise CannotReplay(
                "its ops depend on computed values and write to tensors, so a step cannot be repeated"
            )
        if not self.is_repeatable and any(step.func.overloadpacket in _EMPTY for step in live):
            raise CannotReplay(
                "code outside the captured ops may fill its tensors, and a step cannot be repeated"
            )
        self._states = layers.states()
        names = {name for step in live for name in step.reads if name[0] == "input"}
        self._inputs = {name: _Sizes.of(first, second, apart, name[1]) for name in names}
        self._layers, self._new_tokens = layers, second.new_tokens
        self._written = [layers.layer(index, held) for index, held in second.written.items()]
        if len(second.seen) > 1:
            raise CannotReplay("its cache layers hold different numbers of tokens")
        self._seen = max(second.seen, default=0) - second.new_tokens - apart  # before the first step
        self._looks_at_encoder = any(name[0] == "encoder_sequences" for step in live for name in step.reads)
        known = {*second.written, *first.put}
        if any(name[0] in _OF_CACHE and name[1] not in known for step in live for name in step.reads):
            raise CannotReplay("it reads cache layers that it does not write to")
        told = {name[1] for step in live for name in step.reads if name[0] == "past"}
        # In other layers the ops have fixed places in the storage, which is wrong after tokens move to the front.
        self._dropped = {index: held.dropped for index, held in second.written.items() if index not in told}

    @property
    def ops(self) -> frozenset[Any]:
        """Return the ops that a step runs, without their overloads."""
        return frozenset(step.func.overloadpacket for step in self._steps)

    def is_of(self, captured: Capture, tokens: int) -> bool:
        """Return whether the program predicts a step that was captured so many tokens after the first one."""
        return (
            len(captured.ops) == len(self._all)
            and all(
                mine.is_of(op, captured, tokens) for mine, op in zip(self._all, captured.ops, strict=True)
            )
            and captured.name_of(captured.logits) == self._logits
            and captured.put == self._put
        )

    def run(self, inputs: Mapping[str, Any], tokens: int, *, keeps: bool = True) -> Tensor | None:
        """Return the logits of a step, or None if the step differs from the prediction and the model has to be called.

        Args:
            tokens: of the text since the first captured step.
            keeps: whether the new tokens stay in the cache.

        Raises:
            RuntimeError, ValueError, IndexError: an op failed after states were written that cannot be restored.
        """
        given = self._step_inputs(inputs, tokens)
        if given is None:
            return None
        known, stores = given
        for number, each in enumerate(self._steps):
            try:
                if not each.take(known, tokens):
                    return None
            except (RuntimeError, ValueError, IndexError):
                if number >= self._first_write and not self.is_repeatable:
                    raise
                return None  # the model's own code raises the error, or handles the case
        if keeps:
            for store in stores:
                store.advance(self._new_tokens)
            for index, (keys, values) in self._put.items():
                self._layers.put(index, known[keys], known[values], self._new_tokens)
        logits: Tensor = known[self._logits]
        return logits

    def _step_inputs(
        self, inputs: Mapping[str, Any], tokens: int
    ) -> tuple[dict[Name, Any], list[KeyValueStorage]] | None:
        """Return the tensors of a step by name, and the storages for the new keys and values, or None if they differ from
        the prediction."""
        if not all(sizes.are_those_of(inputs[name[1]], tokens) for name, sizes in self._inputs.items()):
            return None
        if not all(map(is_, self._layers.states(), self._states)):
            return None
        stores = self._layers.reserve(self._written, self._seen + tokens, self._new_tokens)
        if stores is None:
            return None
        known: dict[Name, Any] = {name: inputs[name[1]] for name in self._inputs}
        for layer, store in zip(self._written, stores, strict=True):
            index = layer.index
            if self._dropped.get(index, store.dropped) != store.dropped:
                return None
            known["keys", index], known["values", index] = store.key_storage, store.value_storage
            known["past", index], known["rows", index] = store.length, store.rows
        if self._looks_at_encoder:
            sequences = self._layers.encoder_sequences()
            known |= {("encoder_sequences", index): rows for index, rows in sequences.items()}
        for index in self._put:
            before = self._layers.concatenated_at(index)
            if before.seen != self._seen + tokens:
                return None
            known["keys", index], known["values", index] = before.keys, before.values
        return known, stores


@dataclass(frozen=True)
class _Sizes:
    """The sizes of an input in the first captured step, and their growth with each token of the text."""

    first: tuple[int, ...]
    more: tuple[int, ...]

    @classmethod
    def of(cls, first: Capture, second: Capture, apart: int, name: str) -> _Sizes:
        one, other = first.sizes[name], second.sizes[name]
        if len(one) != len(other):
            raise CannotReplay(f"{name} changes its number of dimensions between steps")
        return cls(tuple(one), tuple(growth(a, b, apart) for a, b in zip(one, other, strict=True)))

    def are_those_of(self, tensor: Tensor, tokens: int) -> bool:
        return tensor.shape == tuple(a + tokens * more for a, more in zip(self.first, self.more, strict=True))


def _step(number: int, first: Capture, second: Capture, apart: int) -> Step:
    one, other = first.ops[number], second.ops[number]
    if len(one.args) != len(other.args) or one.kwargs.keys() != other.kwargs.keys():
        raise CannotReplay(f"{one.func} gets different arguments in each step")

    def source(value: Any, following: Any) -> Source:
        is_new = one.func is MADE_BY_PYTHON
        try:
            return source_of(value, following, first.name_of, second.name_of, apart=apart, is_new=is_new)
        except CannotReplay as refusal:
            raise CannotReplay(f"{one.func}: {refusal}") from None

    made = tree_leaves(one.output)
    outputs: tuple[Name, ...] = ()
    if any(isinstance(leaf, Tensor) for leaf in made):
        outputs = tuple(("output", number, place) for place in range(len(made)))
    if outputs or one.func._schema.is_mutable:
        answer = None
    elif type(one.output) is type(other.output) and one.output == other.output:
        answer = one.output
    else:
        raise CannotReplay(f"{one.func} returns a different value in each step")
    return Step(
        one.func,
        tuple(map(source, one.args, other.args)),
        {name: source(value, other.kwargs[name]) for name, value in one.kwargs.items()},
        outputs,
        answer,
        bool(one.func._schema.is_mutable),
    )


def _live(steps: list[Step], results: set[Name]) -> list[Step]:
    """Return those of `steps` that the results depend on, that write, or that check something."""
    wanted, live = set(results), []
    for step in reversed(steps):
        if step.writes or step.is_check or not wanted.isdisjoint(step.outputs):
            live.append(step)
            wanted |= step.reads
    return live[::-1]
