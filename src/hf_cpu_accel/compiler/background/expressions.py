"""Arithmetic on sizes, as text written by torch's printers. A table of accepted nodes computes it, not Python's `eval`.

The text comes from a file that may be malicious. Parsing rejects names that are not sizes, attributes, and other functions. Values
are limited to 64 bits.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

Number = int | float | bool
_Computes = Callable[[Mapping[str, int]], Any]

_LONGEST = 1 << 16  # characters; guards of deep reshapes have thousands
_BOUND = 1 << 63
_GREATEST_POWER = 63


class Expression:
    """A formula or condition.

    Args:
        text: in Python's notation: numbers, names of sizes, arithmetic, comparisons, `and`, `or`, `not`, `... if ... else ...`, and
            torch's functions for rounding, minimum and maximum.

    Attributes:
        names: the names of the sizes in it.

    Raises:
        ValueError: the text contains anything else.
    """

    def __init__(self, text: str) -> None:
        if len(text) > _LONGEST:
            raise ValueError(f"an expression of {len(text)} characters: expected at most {_LONGEST}")
        names: set[str] = set()
        try:
            self._compute = _computes(ast.parse(text, mode="eval").body, names)
        except (
            SyntaxError,
            RecursionError,
            MemoryError,
        ) as error:  # MemoryError: nested too deeply for the parser
            raise ValueError(f"not an expression: {text[:80]!r}") from error
        self.names = frozenset(names)

    def __call__(self, sizes: Mapping[str, int]) -> Number | None:
        """Return the value, or None after a division by zero, more than 64 bits, or the root of a negative number.

        Raises:
            KeyError: a name is not among `sizes`.
        """
        try:
            value: Number = self._compute(sizes)
        except (ArithmeticError, ValueError, TypeError, RecursionError):
            return None
        return value


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and not -_BOUND <= value < _BOUND:
        raise OverflowError("more than 64 bits")
    return value


def _power(base: Number, exponent: Number) -> Any:
    if isinstance(exponent, int) and not 0 <= exponent <= _GREATEST_POWER:
        raise OverflowError("more than 64 bits")
    return base**exponent


_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_UNARY: dict[type[ast.AST], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
_COMPARISONS: dict[type[ast.AST], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "round": round,
    "math.floor": math.floor,
    "math.ceil": math.ceil,
    "math.trunc": math.trunc,
    "torch.sym_float": float,
    "torch._sym_sqrt": math.sqrt,
}


def _computes(node: ast.expr, names: set[str]) -> _Computes:
    """Return a function that computes the value of `node`, and add the names in `node` to `names`.

    Raises:
        ValueError: the node is not accepted.
    """

    def each(nodes: Iterable[ast.expr]) -> list[_Computes]:
        return [_computes(one, names) for one in nodes]

    match node:
        case ast.Constant(value=bool() | int() | float() as value) if abs(value) < _BOUND:
            return lambda sizes: value
        case ast.Name(id=name):
            names.add(name)
            return operator.itemgetter(name)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _applied(_UNARY[type(sign)], each([operand]))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            return _applied(_BINARY[type(sign)], each([left, right]))
        case ast.Compare(left=left, ops=signs, comparators=others) if {
            *map(type, signs)
        } <= _COMPARISONS.keys():
            return _compared([_COMPARISONS[type(sign)] for sign in signs], each([left, *others]))
        case ast.BoolOp(op=sign, values=values):
            every, conditions = all if isinstance(sign, ast.And) else any, each(values)
            return lambda sizes: every(condition(sizes) for condition in conditions)
        case ast.IfExp(test=test, body=body, orelse=other):
            condition, then, otherwise = each([test, body, other])
            return lambda sizes: then(sizes) if condition(sizes) else otherwise(sizes)
        case ast.Call(func=function, args=operands, keywords=[]) if ast.unparse(function) in _FUNCTIONS:
            return _applied(_FUNCTIONS[ast.unparse(function)], each(operands))
    raise ValueError(f"not supported in an expression on sizes: {ast.unparse(node)[:80]!r}")


def _applied(function: Callable[..., Any], operands: list[_Computes]) -> _Computes:
    return lambda sizes: _bounded(function(*[operand(sizes) for operand in operands]))


def _compared(signs: list[Callable[[Any, Any], bool]], terms: list[_Computes]) -> _Computes:
    def holds(sizes: Mapping[str, int]) -> bool:
        values = [term(sizes) for term in terms]
        return all(sign(*pair) for sign, pair in zip(signs, pairwise(values), strict=True))

    return holds
