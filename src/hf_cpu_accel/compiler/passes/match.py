"""Small questions that several passes ask of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.fx import Node

from hf_cpu_accel.compiler import torch_private

VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
FLOATING = (torch.float32, torch.bfloat16)
CONVERSIONS = (
    torch.ops.aten.to.dtype,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.type_as.default,
)


def is_call(value: object, *targets: Any) -> TypeGuard[Node]:
    """Whether `value` is a node that calls one of `targets`."""
    return isinstance(value, Node) and value.op == "call_function" and value.target in targets


def args_of(node: Node) -> tuple[Any, ...]:
    """The positional arguments; torch's type of them has sixteen cases."""
    return node.args


def value(node: Node) -> Tensor:
    """The fake tensor of a node."""
    found = node.meta["val"]
    assert isinstance(found, Tensor), f"{node} is no tensor"
    return found


def is_tensor(node: object) -> TypeGuard[Node]:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor)


def unconverted(node: Node) -> Node:
    """What `node` is a conversion of to another floating dtype, or `node`."""
    if is_call(node, *CONVERSIONS) and value(args_of(node)[0]).is_floating_point():
        return args_of(node)[0]
    return node


def only_user(node: Node) -> Node | None:
    """The one node that uses `node`, once; None if there are others."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].op == "call_function" else None


def argument(node: Node, name: str) -> Any:
    """An argument of a call by its name in the schema, given or default."""
    target: Any = node.target
    for position, declared in enumerate(target._schema.arguments):
        if declared.name == name:
            if position < len(args_of(node)):
                return args_of(node)[position]
            return node.kwargs.get(name, declared.default_value)
    raise KeyError(name)


def same_sizes(first: Sequence[object], second: Sequence[object]) -> bool:
    """Whether sizes are known to be equal for all inputs: asking adds no guards."""
    return len(first) == len(second) and all(same_size(a, b) for a, b in zip(first, second, strict=True))


def same_size(first: Any, second: Any) -> bool:
    if isinstance(first, torch.SymInt) or isinstance(second, torch.SymInt):
        return str(first) == str(second) or torch_private.is_always(first == second)
    return bool(first == second)


def must_be_same_size(first: Any, second: Any) -> bool:
    """Whether sizes are equal, where the model's own op takes nothing else (but ones, which it repeats): what is so in this call is
    so in the next, and the guard that this may add costs no second graph."""
    return bool(first == second)


def is_one(size: object) -> bool:
    """Whether a size is 1 for all inputs."""
    return not isinstance(size, torch.SymInt) and size == 1


def axis(number: Any, dims: int) -> int:
    """A dimension counted from the front."""
    return int(number) % dims
