"""Normalize steps to the few forms that matchers support: no sizes of scores, no `einsum`, and no writes to temporaries."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_cpu_accel.rewrite.capture.program import Ref, Step, replace_refs, size_of
from hf_cpu_accel.rewrite.core.trace import BMM, MATMUL, SOFTMAX
from hf_cpu_accel.rewrite.linear.layer import PackedLinear

PRODUCT = frozenset((*MATMUL, *BMM))
TIMES = frozenset((torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__))
OVER = frozenset((torch.div, torch.true_divide, Tensor.div, Tensor.__truediv__))
PLUS = frozenset((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__))
MINUS = frozenset((torch.sub, torch.subtract, Tensor.sub, Tensor.__sub__))
FILL = frozenset((Tensor.masked_fill, torch.masked_fill))
FILLS = FILL | {Tensor.masked_fill_}
CAST = frozenset((Tensor.to, Tensor.float, Tensor.type, Tensor.type_as, Tensor.contiguous))
VIEW = frozenset((Tensor.view, Tensor.reshape))
JOIN = frozenset((torch.cat, torch.concat))
TANH = frozenset[Any]((torch.tanh, functional.tanh, Tensor.tanh))
SCORES = CAST | TIMES | OVER | FILL | VIEW | PLUS | MINUS | TANH  # ops on scores
# Functions that return new memory.
_NEW = frozenset(
    (*PRODUCT, *TIMES, *OVER, *PLUS, *MINUS, *FILL, *SOFTMAX, torch.einsum, torch.where, functional.conv1d)
)
# Functions that return a view of their first argument, or new memory.
VIEWS = VIEW | {
    *(Tensor.__getitem__, Tensor.transpose, torch.transpose, Tensor.permute, torch.permute, Tensor.unsqueeze),
    *(torch.unsqueeze, Tensor.squeeze, torch.squeeze, torch.reshape, functional.pad, Tensor.contiguous),
}


def with_sizes_of_operands(steps: list[Step]) -> list[Step]:
    """Return `steps` that read the sizes of the operands of scores instead of those of the scores."""
    made = {step.result: step for step in steps}
    same: dict[Ref, Ref] = {}
    found: list[Step] = []
    for step in steps:
        step = replace(step, args=replace_refs(step.args, lambda ref: same.get(ref, ref)))
        if step.function is size_of:
            owner, dim = _operand(step.args[0], step.args[1], made)
            if isinstance(owner, Step):  # a view, which was told its size
                size = _shape_of_view(owner)[dim]
                same[step.result] = same.get(size, size)
                continue
            step = replace(step, args=(owner, dim))
        found.append(replace(step, kwargs=replace_refs(step.kwargs, lambda ref: same.get(ref, ref))))
    return found


def _operand(owner: Ref, dim: int, made: dict[Ref, Step]) -> tuple[Ref | Step, int]:
    """Return the tensor with this size, counted from the last dimension, or the view that got it as a size."""
    step = made.get(owner)
    while step is not None and not step.effect and step.args:
        if step.function in VIEW:
            shape = _shape_of_view(step)
            return (step if len(shape) >= -dim and isinstance(shape[dim], Ref) else owner), dim
        source = _of_same_size(step, dim, made)
        if source is None:
            break
        owner = source
        step = made.get(owner)
    return owner, dim


def _of_same_size(step: Step, dim: int, made: dict[Ref, Step]) -> Ref | None:
    """Return the argument of a step on scores that has the size of its result, or None."""
    first, *rest = step.args
    source: Any = None
    if step.function in PRODUCT and len(rest) == 1:
        source = rest[0] if dim == -1 else first
    elif step.function in SOFTMAX or step.function in CAST or step.function in FILL:
        source = first
    elif step.function in SCORES:
        source = scores_in(step, made)
    return source if isinstance(source, Ref) else None


def scores_in(step: Step, made: dict[Ref, Step]) -> Ref | None:
    """Return the argument of a step that may be the scores, or None."""
    if (joined := with_sink(step)) is not None:
        return joined[0]
    if step.function not in SCORES or not step.args:
        return None
    operands = step.args[:1]
    if step.function in PLUS or step.function in TIMES:
        operands = step.args[:2]
    refs = [operand for operand in operands if isinstance(operand, Ref)]
    if len(refs) < 2:
        return refs[0] if refs else None
    return next((ref for ref in refs if is_of_scores(ref, made)), None)


def without_expansions(steps: list[Step]) -> list[Step]:
    """Return `steps` in which masks are not expanded to the size of the tensor that they fill."""
    readers = _readers(steps)
    same = {
        step.result: step.args[0]
        for step in steps
        if step.function is Tensor.expand_as
        and all(
            reader.function in FILLS and reader.args[:2] == (step.args[1], step.result)
            for reader in readers.get(step.result, [])
        )
    }
    return _renamed(steps, same)


def without_maxima(steps: list[Step]) -> list[Step]:
    """Return `steps` without the subtraction of the row maximum before a softmax, which has no effect."""
    made = {step.result: step for step in steps}
    readers = _readers(steps)
    same = {
        step.result: step.args[0]
        for step in steps
        if step.function in MINUS
        and len(step.args) == 2
        and _is_maximum(made.get(step.args[1]), step.args[0], made)
        and all(_is_of_rows(reader) for reader in readers.get(step.result, []))
    }
    return _renamed(steps, same)


def _is_of_rows(step: Step) -> bool:
    """Return whether the step is a softmax over the last dimension."""
    return step.function in SOFTMAX and step.kwargs.get("dim", (*step.args, None)[1]) == -1


def _is_maximum(step: Step | None, of: Ref, made: dict[Ref, Step]) -> bool:
    """Return whether the step computes the maxima of rows."""
    if step is None or step.function is not operator.getitem or step.args[1:] != (0,):
        return False
    maximum = made.get(step.args[0])
    if maximum is None or maximum.function not in (torch.max, Tensor.max):
        return False
    given = dict(zip(("dim", "keepdim"), maximum.args[1:], strict=False)) | maximum.kwargs
    return maximum.args[0] == of and given == {"dim": -1, "keepdim": True}


def _readers(steps: list[Step]) -> dict[Ref, list[Step]]:
    readers: dict[Ref, list[Step]] = {}
    for step in steps:
        for ref in step.reads:
            readers.setdefault(ref, []).append(step)
    return readers


def _renamed(steps: list[Step], same: dict[Ref, Ref]) -> list[Step]:
    """Return `steps` without those whose results are keys of `same`; readers use the refs in it."""

    def find(ref: Ref) -> Ref:
        return same.get(ref, ref)

    kept = [step for step in steps if step.result not in same]
    return [replace(step, args=replace_refs(step.args, find)) for step in kept] if same else kept


def with_sink(step: Step) -> tuple[Ref, Ref] | None:
    """Return (scores, one more score for each query) if the step concatenates them, or None."""
    if (
        step.function not in JOIN
        or len(step.args) not in (1, 2)
        or not isinstance(step.args[0], tuple | list)
    ):
        return None
    dim = step.kwargs.get("dim", step.args[1] if len(step.args) == 2 else 0)
    parts = step.args[0]
    if dim != -1 or len(parts) != 2 or not all(isinstance(part, Ref) for part in parts):
        return None
    return parts[0], parts[1]


def is_without_sink(step: Step) -> bool:
    """Return whether the step drops the last key of weights."""
    last = (Ellipsis, slice(None, -1, None))
    return step.function == Tensor.__getitem__ and step.args[1:] == (last,)


def is_of_scores(ref: Ref, made: dict[Ref, Step]) -> bool:
    step = made.get(ref)
    while step is not None and step.function not in PRODUCT:
        source = step.args[0] if step.function in SCORES and step.args else None
        step = made.get(source) if isinstance(source, Ref) else None
    return step is not None


def _shape_of_view(step: Step) -> Any:
    return step.args[1] if len(step.args) == 2 and isinstance(step.args[1], tuple | list) else step.args[1:]


def without_einsum(steps: list[Step]) -> list[Step]:
    """Return `steps` with matrix products in place of each `einsum` that is one."""
    numbers = count(1 + max((step.result.number for step in steps), default=0))
    return [made for step in steps for made in _without_einsum(step, numbers)]


def _without_einsum(step: Step, numbers: Iterator[int]) -> Iterator[Step]:
    orders = _orders(step) if step.function is torch.einsum and not step.kwargs else None
    if orders is None:
        yield step
        return
    operands = step.args[1] if len(step.args) == 2 else step.args[1:]
    turned: list[Ref] = []
    for operand, order in zip(operands, orders[:2], strict=True):
        turned.append(operand)
        if list(order) != sorted(order):
            turned[-1] = Ref(next(numbers))
            yield replace(step, function=permute_last, args=(operand, *order), result=turned[-1])
    product = replace(step, function=torch.matmul, args=tuple(turned))
    if list(orders[2]) == sorted(orders[2]):
        yield product
        return
    product = replace(product, result=Ref(next(numbers)))
    yield product
    yield replace(step, function=permute_last, args=(product.result, *orders[2]))


def _orders(step: Step) -> tuple[list[int], list[int], list[int]] | None:
    """Return the orders of dimensions of both operands and of the product that make an `einsum` a matrix product, or None."""
    equation = step.args[0]
    operands = step.args[1] if len(step.args) == 2 else step.args[1:]
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation:
        return None
    inputs, output = equation.replace(" ", "").split("->")
    parts = [*inputs.split(","), output]
    if all(part.startswith("...") for part in parts):  # further batch dimensions, which stay in front
        parts = [part[3:] for part in parts]
    if "." in "".join(parts):
        return None
    one, other, output = parts
    batch = [letter for letter in output if letter in one and letter in other]
    rows, columns = ([x for x in output if x in part and x not in batch] for part in (one, other))
    summed = [letter for letter in one if letter in other and letter not in output]
    if any(len(letters) != 1 for letters in (rows, columns, summed)):
        return None
    wanted = [*batch, *rows, *summed], [*batch, *summed, *columns], [*batch, *rows, *columns]
    if any(
        sorted(letters) != sorted(given) for letters, given in zip(wanted, (one, other, output), strict=True)
    ):
        return None
    return (
        [one.index(letter) for letter in wanted[0]],
        [other.index(letter) for letter in wanted[1]],
        [wanted[2].index(letter) for letter in output],
    )


def permute_last(tensor: Tensor, *order: int) -> Tensor:
    """Return `tensor` with its last dimensions in another order."""
    before = tensor.dim() - len(order)
    return tensor.permute(*range(before), *(before + dim for dim in order))


def without_needless_writes(steps: list[Step], reads: Counter[Ref]) -> list[Step]:
    """Return `steps` with new tensors in place of written ones that only the writing step reads.

    Args:
        reads: how often each ref is read, by steps and as an output.
    """
    made = {step.result: step for step in steps}
    sizes = Counter(step.args[0] for step in steps if step.function is size_of)
    reads = reads - sizes
    for step in steps:
        if step.effect:
            made[step.result] = _without_write(step, made, reads)
    return list(made.values())


def _without_write(step: Step, made: dict[Ref, Step], reads: Counter[Ref]) -> Step:
    target = step.args[0] if step.args else None
    if not isinstance(target, Ref) or not _is_alone(target, made, reads):
        return step
    name = getattr(step.function, "__name__", "")
    kwargs = dict(step.kwargs)
    if kwargs.pop("inplace", False) is True:
        return replace(step, kwargs={**kwargs, "inplace": False}, effect=False)
    other = name.replace("__i", "__", 1) if name.startswith("__i") else name[: -name.endswith("_") or None]
    function = getattr(Tensor, other, None)
    return step if function is None or other == name else replace(step, function=function, effect=False)


def _is_alone(ref: Ref, made: dict[Ref, Step], reads: Counter[Ref]) -> bool:
    """Return whether the ref is a temporary: in its own memory, without other readers."""
    step = made.get(ref)
    while step is not None and not step.effect and reads[step.result] == 1:
        if step.function in _NEW or getattr(type(step.leaf), "forward", None) is PackedLinear.forward:
            return True
        source = step.args[0] if step.function in VIEWS and step.args else None
        step = made.get(source) if isinstance(source, Ref) else None
    return False
