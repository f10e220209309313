"""The metadata of a compiled block as JSON, its tensors as safetensors. Reading them runs no code.

A value is written as itself, or as an object of one entry that names its kind: `{"dtype": "float32"}`, `{"PackedLinears": {...}}`.
Reading accepts only the classes below, with exactly their fields and types.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, get_type_hints

import safetensors.torch
import torch
from huggingface_hub.dataclasses import type_validator
from torch import Tensor

from hf_cpu_accel.compiler import weight_transforms
from hf_cpu_accel.compiler.background.compiled import LIBRARY, Compiled, Place
from hf_cpu_accel.compiler.background.reads import Read
from hf_cpu_accel.compiler.bind import Request
from hf_cpu_accel.compiler.report import GraphReport

NAME, TENSORS = "block.json", "constants.safetensors"
FORMAT = 2  # 1 was a pickle
_LONGEST = 1 << 24  # bytes
_BOUND = 1 << 63
_CLASSES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        Compiled,
        GraphReport,
        Place,
        Read,
        Request,
        weight_transforms.Composed,
        weight_transforms.Computed,
        weight_transforms.FoldedNorm,
        weight_transforms.JoinedBiases,
        weight_transforms.PackedConvolution,
        weight_transforms.PackedLinears,
        weight_transforms.Part,
        weight_transforms.Value,
    )
}
_OP = re.compile(r"(aten|prims|quantized_decomposed)\.\w+\.\w+")  # as passes/constants.py writes them


def write(compiled: Compiled, folder: Path) -> None:
    """Write the description of the library in `folder` into `folder`.

    Raises:
        TypeError, ValueError: `compiled` contains a value that `read` would reject.
    """
    tensors: dict[str, Tensor] = {}
    written = _written(compiled, tensors)
    safetensors.torch.save_file(tensors, folder / TENSORS)
    hashes = {name: _hash((folder / name).read_bytes()) for name in (LIBRARY, TENSORS)}
    text = json.dumps({"format": FORMAT, "hashes": hashes, "compiled": written}, indent=1, allow_nan=False)
    (folder / NAME).write_text(text)
    read(folder)


def read(folder: Path) -> Compiled:
    """Read the description that `write` wrote into `folder`.

    Raises:
        OSError: a file is missing.
        TypeError, ValueError: a file is damaged, of another format, or contains a value that is not accepted.
    """
    text = (folder / NAME).read_bytes()
    if len(text) > _LONGEST:
        raise ValueError(f"block.json has {len(text)} bytes: expected at most {_LONGEST}")
    fields_read = json.loads(text, parse_constant=_refuse)
    if not isinstance(fields_read, dict) or fields_read.get("format") != FORMAT:
        raise ValueError(f"block.json is not of format {FORMAT}")
    # Not mapped: a file that is truncated while it is in use would end the process.
    constants = (folder / TENSORS).read_bytes()
    hashes = {LIBRARY: _hash((folder / LIBRARY).read_bytes()), TENSORS: _hash(constants)}
    if fields_read.get("hashes") != hashes:
        raise ValueError("its files have changed since they were written")
    try:
        compiled = _read(fields_read.get("compiled"), safetensors.torch.load(constants))
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from error
    if not isinstance(compiled, Compiled):
        raise ValueError("block.json does not describe a block")
    _check(compiled)
    return compiled


def _written(value: Any, tensors: dict[str, Tensor]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind in (tuple, list, torch.Size):
        return [_written(part, tensors) for part in value]
    if kind is dict:
        return {"dict": {name: _written(part, tensors) for name, part in value.items()}}
    if kind is float:
        return {"float": str(value)}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.contiguous()
        return {"tensor": name}
    if _CLASSES.get(kind.__name__) is kind:
        return {kind.__name__: {f.name: _written(getattr(value, f.name), tensors) for f in fields(value)}}
    raise TypeError(f"a {kind.__name__} cannot be written to block.json")


def _read(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return tuple([_read(part, tensors) for part in value])
    if isinstance(value, int) and not -_BOUND <= value < _BOUND:
        raise ValueError(f"a number of {value.bit_length()} bits: expected at most 64")
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError(f"an object of {len(value)} entries: expected one, the kind of a value")
    ((kind, content),) = value.items()
    if kind in _CLASSES:
        return _object(_CLASSES[kind], content, tensors)
    if kind == "dict" and isinstance(content, dict):
        return {name: _read(part, tensors) for name, part in content.items()}
    if kind == "float" and content in ("inf", "-inf", "nan"):
        return float(content)
    if (
        kind == "dtype"
        and isinstance(content, str)
        and isinstance(getattr(torch, content, None), torch.dtype)
    ):
        return getattr(torch, content)
    if kind == "tensor" and isinstance(content, str) and content in tensors:
        return tensors[content]
    raise ValueError(f"not a value: {str(value)[:80]}")


def _object(cls: Any, content: Any, tensors: Mapping[str, Tensor]) -> Any:
    names = {field.name for field in fields(cls)}
    if not isinstance(content, dict) or content.keys() != names:
        raise ValueError(f"{cls.__name__}: expected the fields {sorted(names)}")
    values = {name: _read(part, tensors) for name, part in content.items()}
    for name, hint in get_type_hints(cls).items():
        type_validator(name, values[name], hint)
    instance = cls(**values)
    if isinstance(instance, weight_transforms.Computed):
        for op, _, _ in instance.steps:
            _check_op(op)
    return instance


def _check_op(name: str) -> None:
    """Raise ValueError unless the op computes tensors and has no other effect."""
    op = attrgetter(name)(torch.ops) if _OP.fullmatch(name) else None
    if not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable:
        raise ValueError(f"{name[:80]!r} is not an op that a recipe may run")
    if any(argument.name == "filename" for argument in op._schema.arguments):
        raise ValueError(f"{name!r} reads or writes files, which a recipe may not do")


def _check(compiled: Compiled) -> None:
    """Check the indices and kinds, which types do not cover."""
    used = [*compiled.kept, *(position for request in compiled.requests for position in request.positions)]
    if not all(0 <= position < len(compiled.places) for position in used):
        raise ValueError("an index of an input is out of range")
    if not all(map(_is_place, compiled.places)):
        raise ValueError("an input has no valid place")
    for output in compiled.outputs:
        if type(output) is not int and not (
            type(output) is tuple and len(output) == 2 and output[0] == "constant"
        ):
            raise ValueError("an output has no valid kind")


def _is_place(place: Place) -> bool:
    if place.kind == "input":
        return type(place.path) is int and place.path >= 0
    if place.kind == "constant":
        return place.path is None or isinstance(place.path, Tensor)
    return place.kind == "state" and type(place.path) is tuple and all(map(_is_step, place.path))


def _is_step(step: Any) -> bool:
    if type(step) is not tuple or len(step) != 2:
        return False
    kind, name = step
    return (kind == "attribute" and type(name) is str) or (kind == "item" and type(name) in (int, str))


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not valid JSON")


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
