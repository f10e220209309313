"""Modes of torch that intercept the calls of this thread. This is the only file that uses torch's mode classes.

While a mode is active, each call goes to its function `around(func, args, kwargs)`, which makes the call or returns another result.
Calls inside of this function bypass the mode, and go to the outer mode or to torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Around = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class AroundFunctions(TorchFunctionMode):
    """Intercepts torch functions called from Python, such as `torch.softmax`, and methods and attributes of tensors."""

    def __init__(self, around: Around) -> None:
        super().__init__()
        self._around = around

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._around(func, args, kwargs or {})


class AroundOps(TorchDispatchMode):
    """Intercepts ops below autograd, such as `torch.ops.aten.embedding.default`, from any caller."""

    def __init__(self, around: Around) -> None:
        super().__init__()
        self._around = around

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._around(func, args, kwargs or {})


class AroundAllOps(AroundOps):
    """Also intercepts higher-order ops such as `flex_attention` and `cond`, which are not `OpOverload`s."""

    supports_higher_order_operators = True
