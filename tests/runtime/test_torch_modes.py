"""One file has modes of torch, and what is built on it sees what a mode sees: each call once, and none that is made within."""

from pathlib import Path
from typing import Any

import torch

import hf_cpu_accel
from hf_cpu_accel.runtime.torch_modes import AroundFunctions, AroundOps

INPUT = torch.tensor([1.0, 2.0])


def test_functions_are_asked_for_as_python_calls_them() -> None:
    asked: list[Any] = []

    def around(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        asked.append((func, args, kwargs))
        return torch.mul(func(*args, **kwargs), 2)  # by the mode

    with AroundFunctions(around):
        output = torch.softmax(INPUT, dim=-1)
    assert [(func, kwargs) for func, _, kwargs in asked] == [(torch.softmax, {"dim": -1})]
    assert asked[0][1][0] is INPUT
    assert torch.equal(output, 2 * torch.softmax(INPUT, dim=-1))


def test_ops_are_those_below_autograd() -> None:
    asked: list[Any] = []

    def around(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        asked.append(op)
        return op(*args, **kwargs)

    weight = torch.ones(3, 2, requires_grad=True)
    with AroundOps(around):
        output = torch.nn.functional.linear(INPUT[None], weight)
    assert torch.ops.aten.mm.default in asked
    assert torch.ops.aten.linear.default not in asked
    assert output.requires_grad


def test_the_inner_mode_is_asked_first() -> None:
    order: list[str] = []

    def named(name: str) -> AroundFunctions:
        return AroundFunctions(lambda func, args, kwargs: (order.append(name), func(*args, **kwargs))[1])

    with named("outer"), named("inner"):
        torch.exp(INPUT)
    assert order == ["inner", "outer"]


def test_no_other_file_has_a_mode_of_its_own() -> None:
    package = Path(hf_cpu_accel.__file__).parent
    names = ("TorchFunctionMode", "TorchDispatchMode")
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(name in path.read_text() for name in names)
    }
    assert found == {"runtime/torch_modes.py"}
