"""Export of a model to one file that runs without Python: torch.export, then AOTInductor, with this package's ops.

The file contains the packed weights of the accelerated model and computes the same outputs. Run it from Python with `load_aot`,
from C++ with `integrations/cpp`.

The file is machine code: load only files that you trust.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import Dim

from hf_cpu_accel import extension
from hf_cpu_accel.compiler import lowerings
from hf_cpu_accel.compiler.torch_private import has_compiler, load_package, write_package
from hf_cpu_accel.hosts.models import is_transformers_model
from hf_cpu_accel.runtime.hardware import detect

SUFFIX = ".pt2"


def export_aot(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    path: str | Path,
    *,
    dynamic_shapes: Mapping[str, Any] | None = None,
) -> Path:
    """Compile the forward pass of `model`, accelerated or not, into the file `path`. The model does not change.

    Args:
        model: a transformers model or any module that `torch.export` can trace, in eval mode.
        inputs: keyword arguments of one call, tensors with two or more rows, so that the number of rows may vary.
        path: ends in ".pt2"; an existing file is overwritten.
        dynamic_shapes: see `torch.export.export`. By default the first dimension of every input may vary, and the second dimension
            of integer matrices (tokens).

    Returns:
        The path. The outputs of the file are the tensors among the model's outputs; their names are in the file's metadata.

    Raises:
        ValueError: a wrong path or inputs, a model in training mode, or an output of an unsupported type.
        RuntimeError: there is no C++ compiler, or the kernels are not loaded.
        Exception: torch.export cannot export the model.
    """
    path = Path(path)
    if path.suffix != SUFFIX:
        raise ValueError(f"path={str(path)!r}: expected a file name that ends in {SUFFIX!r}")
    if not path.parent.is_dir():
        raise ValueError(
            f"path={str(path)!r}: the folder {str(path.parent)!r} does not exist; create it first"
        )
    if model.training:
        raise ValueError("model is in training mode; call model.eval() before you export it")
    if not inputs or not all(isinstance(value, Tensor) and value.dim() > 0 for value in inputs.values()):
        raise ValueError(
            "inputs: expected a mapping from argument names to tensors with at least one dimension"
        )
    if dynamic_shapes is None:
        short = [name for name, value in inputs.items() if value.shape[0] < 2]
        if short:
            raise ValueError(
                f"inputs {short} have one row, which would fix their shapes; pass two or more rows, or dynamic_shapes"
            )
        dynamic_shapes = _free_rows_and_tokens(inputs)
    _check_build()
    program, outputs = _trace(model, inputs, dynamic_shapes)
    metadata = {
        "inputs": json.dumps(list(inputs)),
        "outputs": json.dumps(outputs),
        "hf_cpu_accel": version("hf_cpu_accel"),
        "torch": torch.__version__,
        "cpu": detect().model_name,
    }
    with lowerings.in_use():
        write_package(program, str(path), metadata)
    return path


def load_aot(path: str | Path) -> Callable[..., dict[str, Tensor]]:
    """Load a file of `export_aot`.

    Args:
        path: of the file. It is machine code: load only files that you trust.

    Returns:
        A function of the inputs by name that returns the outputs by name. It raises TypeError for other names.

    Raises:
        ValueError: the file does not exist, or was not written by `export_aot`.
        RuntimeError: the kernels are not loaded.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"path={str(path)!r}: file not found")
    _check_kernels()
    compiled, metadata = load_package(str(path))
    if "hf_cpu_accel" not in metadata:
        raise ValueError(f"path={str(path)!r}: not a file of export_aot; write it with export_aot")
    names, outputs = json.loads(metadata["inputs"]), json.loads(metadata["outputs"])

    def run(**inputs: Tensor) -> dict[str, Tensor]:
        if set(inputs) != set(names):
            raise TypeError(f"inputs {sorted(inputs)} do not match the file; expected {', '.join(names)}")
        return dict(zip(outputs, compiled(**inputs), strict=True))

    return run


def _free_rows_and_tokens(inputs: Mapping[str, Tensor]) -> dict[str, dict[int, Any]]:
    batch, sequence = Dim("batch", min=1), Dim("sequence", min=1)
    return {
        name: {0: batch, 1: sequence} if value.dim() == 2 and not value.is_floating_point() else {0: batch}
        for name, value in inputs.items()
    }


def _trace(
    model: nn.Module, inputs: Mapping[str, Tensor], dynamic_shapes: Mapping[str, Any]
) -> tuple[torch.export.ExportedProgram, list[str]]:
    """Return the program and the names of its outputs: the model's own names, with an index inside tuples."""
    with torch.no_grad():
        outputs = _names(model(**inputs))
        if is_transformers_model(model):
            from transformers.exporters.configs import DynamoConfig
            from transformers.exporters.exporter_dynamo import DynamoExporter

            config = DynamoConfig(dynamic_shapes=dict(dynamic_shapes))
            exported = DynamoExporter().export(cast(Any, model), dict(inputs), config=config)
            return exported.program, outputs
        program = torch.export.export(
            model, (), dict(inputs), dynamic_shapes=dict(dynamic_shapes), strict=False
        )
        return program, outputs


def _names(output: Any, name: str = "") -> list[str]:
    if isinstance(output, Tensor):
        return [name or "output"]
    if isinstance(output, Mapping):
        parts = [(str(key), value) for key, value in output.items()]
    elif isinstance(output, (tuple, list)):
        parts = [(str(index), value) for index, value in enumerate(output)]
    elif output is None:
        return []
    else:
        raise ValueError(
            f"the model's output {name or 'itself'} is of type {type(output).__name__}; expected tensors, or mappings, tuples "
            "and lists of tensors"
        )
    return [path for key, value in parts for path in _names(value, f"{name}.{key}" if name else key)]


def _check_build() -> None:
    _check_kernels()
    if not has_compiler():
        raise RuntimeError(
            "export_aot needs a C++ compiler, and found none; install one (Debian, Ubuntu: apt install g++) or set the "
            "environment variable CXX"
        )


def _check_kernels() -> None:
    status = extension.status()
    if not status.loaded:
        raise RuntimeError(f"compiled files need the native kernels, which are not loaded: {status.error}")
