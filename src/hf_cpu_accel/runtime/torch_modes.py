"""Hooks around what this thread asks torch for: the one file with modes of torch, on which what watches or answers calls is built.

While one of them is on, each call goes to its function `around(func, args, kwargs)`, which makes the call, or answers in its place.
What is called in there goes by the mode: to the one around it, or to torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Around = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class AroundFunctions(TorchFunctionMode):
    """For functions of torch as Python calls them, such as `torch.softmax`, methods and attributes of tensors among them."""

    def __init__(self, around: Around) -> None:
        super().__init__()
        self._around = around

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._around(func, args, kwargs or {})


class AroundOps(TorchDispatchMode):
    """For ops below autograd, such as `torch.ops.aten.embedding.default`, whoever calls them."""

    def __init__(self, around: Around) -> None:
        super().__init__()
        self._around = around

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._around(func, args, kwargs or {})


class AroundAllOps(AroundOps):
    """For higher-order ops, too, such as `flex_attention` and `cond`, which are no `OpOverload`."""

    supports_higher_order_operators = True
