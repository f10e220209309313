"""The file of a packed model: its packed weights, its other tensors, and the settings of the acceleration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_cpu_accel.packing.linear import PackedWeight
from hf_cpu_accel.packing.saved_weight import SavedWeight, check_packed, check_permutation
from hf_cpu_accel.packing.tensor_file import DamagedFile, TensorFile, write

FILE_NAME = "cpu_accel.safetensors"
FORMAT_VERSION = 1
_KEY = "cpu_accel"


@dataclass(frozen=True)
class PackedModelFile:
    """The content of the file of a packed model.

    Attributes:
        path: the file.
        weights: the packed weights; their tensors are views of the mapped file.
        plain: the other parameters and buffers by their paths, also views.
        about: the argument of `write_packed`.
    """

    path: Path
    weights: tuple[SavedWeight, ...]
    plain: Mapping[str, Tensor]
    about: Mapping[str, Any]


def write_packed(
    path: Path, weights: Sequence[SavedWeight], plain: Mapping[str, Tensor], about: Mapping[str, Any]
) -> int:
    """Write a packed model, and return the number of bytes.

    Args:
        plain: parameters and buffers that are not packed, by their paths.
        about: the settings of the acceleration, as JSON types.

    Raises:
        ValueError: safetensors does not support the dtype of a tensor.
        OSError: the file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    rows = []
    for weight in weights:
        packed, named = weight.packed, weight.tensors()
        tensors.update(named)
        rows.append(
            {
                "rule": weight.rule,
                "parameters": list(weight.parameters),
                "dtype": packed.dtype,
                "in_features": packed.in_features,
                "out_features": packed.out_features,
                "tensors": list(named),
            }
        )
    header = {"format_version": FORMAT_VERSION, "about": dict(about), "weights": rows, "plain": list(plain)}
    # Larger tensors first, so that the weights start at pages.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].nbytes))
    return write(path, {**ordered, **plain}, {"format": "pt", _KEY: json.dumps(header)})


def check_version(version: object, written_by: str) -> None:
    """Check the version of the format in a config.

    Raises:
        DamagedFile: this version of hf_cpu_accel does not read it.
    """
    if version != FORMAT_VERSION:
        raise DamagedFile(
            f"the config has format version {version!r} of packed files, and this version of hf_cpu_accel reads "
            f"{FORMAT_VERSION}: install the version that wrote it ({written_by}), or pack the model again with this one"
        )


def read_packed(path: Path) -> PackedModelFile:
    """Map the file of a packed model, and verify all checksums.

    Raises:
        DamagedFile: the file is truncated, changed, not a packed model, or of another format version.
        OSError: the file cannot be read.
    """
    file = TensorFile(path)
    try:
        header = json.loads(file.metadata[_KEY])
        version = header["format_version"]
        if version != FORMAT_VERSION:
            raise ValueError(
                f"it has format version {version!r}, and this version of hf_cpu_accel reads {FORMAT_VERSION}: "
                "install the version that wrote it, or pack the model again with this one"
            )
        file.check()
        weights = tuple(_weight(row, file) for row in header["weights"])
        plain = {name: file[name] for name in header["plain"]}
        about = dict(header["about"])
    except DamagedFile:
        raise
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise file.damaged(
            f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else error
        ) from error
    return PackedModelFile(path, weights, plain, about)


def _weight(row: Mapping[str, Any], file: TensorFile) -> SavedWeight:
    first = row["parameters"][0]
    tensors = {name.removeprefix(f"{first}.packed"): file[name] for name in row["tensors"]}
    sizes = int(row["in_features"]), int(row["out_features"])
    packed = PackedWeight(tensors[""], tensors.get("_scale"), *sizes, str(row["dtype"]))
    check_packed(packed)
    check_permutation(permutation := tensors.get("_permutation"), packed.in_features)
    return SavedWeight(str(row["rule"]), tuple(row["parameters"]), packed, tensors.get("_lost"), permutation)
