"""Small checks of nodes that several passes use."""

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
    """Return whether `value` is a node that calls one of `targets`."""
    return isinstance(value, Node) and value.op == "call_function" and value.target in targets


def args_of(node: Node) -> tuple[Any, ...]:
    """Return the positional arguments as Any; torch's type of them has sixteen cases."""
    return node.args


def value(node: Node) -> Tensor:
    """Return the fake tensor of a node."""
    tensor = node.meta["val"]
    assert isinstance(tensor, Tensor), f"{node} is not a tensor"
    return tensor


def is_tensor(node: object) -> TypeGuard[Node]:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor)


def unconverted(node: Node) -> Node:
    """Return the input of a conversion between floating dtypes, else `node` itself."""
    if is_call(node, *CONVERSIONS) and value(args_of(node)[0]).is_floating_point():
        return args_of(node)[0]
    return node


def only_user(node: Node) -> Node | None:
    """Return the only user of `node`, if it is a call; None otherwise."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].op == "call_function" else None


def argument(node: Node, name: str) -> Any:
    """Return an argument of a call by its name in the schema, or its default."""
    target: Any = node.target
    for position, declared in enumerate(target._schema.arguments):
        if declared.name == name:
            if position < len(args_of(node)):
                return args_of(node)[position]
            return node.kwargs.get(name, declared.default_value)
    raise KeyError(name)


def same_sizes(first: Sequence[object], second: Sequence[object]) -> bool:
    """Return whether sizes are equal for all inputs, as far as is known without adding guards."""
    return len(first) == len(second) and all(same_size(a, b) for a, b in zip(first, second, strict=True))


def same_size(first: Any, second: Any) -> bool:
    if isinstance(first, torch.SymInt) or isinstance(second, torch.SymInt):
        return str(first) == str(second) or torch_private.is_always(first == second)
    return bool(first == second)


def must_be_same_size(first: Any, second: Any) -> bool:
    """Return whether sizes are equal; may add a guard.

    For sizes that the model's own op requires to be equal (or one, which it repeats), so that the guard costs no second graph.
    """
    return bool(first == second)


def is_one(size: object) -> bool:
    """Return whether a size is 1 for all inputs."""
    return not isinstance(size, torch.SymInt) and size == 1


def axis(number: Any, dims: int) -> int:
    """Return a dimension counted from the front."""
    return int(number) % dims
