"""The transformers quantizer that loads checkpoints of other tools in their format. Importing this imports transformers."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, apply_renamings
from transformers.modeling_utils import load_state_dict
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_cpu_accel.checkpoints.formats import Checkpoint, checkpoint_of
from hf_cpu_accel.checkpoints.layout import UnreadableCheckpoint
from hf_cpu_accel.checkpoints.stored_linear import StoredLinear
from hf_cpu_accel.frontends.stored_experts import JoinedExperts, join_linears, put_linears

# Tensors for kernels that quantize activations and caches, which are not used.
_UNUSED = r"\.(input_scale|input_zero_point|input_global_scale|output_scale|[kqv]_scale|activation_scale|weight_zero_point)$"


class StoredConfig(QuantizationConfigMixin):
    """The `quantization_config` of another tool in config.json."""

    quant_method: Any

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


class StoredQuantizer(HfQuantizer):
    """Replace each linear that is quantized in the files by a `StoredLinear`, which transformers loads.

    Raises:
        UnreadableCheckpoint: the config or the files are damaged, or in an unknown format. Nothing is loaded then.
    """

    requires_calibration = True  # it loads quantized weights, but does not quantize
    _checkpoint: Checkpoint
    _joined: list[JoinedExperts]

    def __init__(self, quantization_config: StoredConfig, *, has_experts: bool, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._has_experts = has_experts
        self._checkpoint = checkpoint_of(quantization_config.to_dict())

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        stored = _tensors_of(checkpoint_files or (), model)
        self._joined = put_linears(model, stored, self._checkpoint)
        experts = tuple(f"{one.path}." for one in self._joined)
        layouts = {
            path: self._checkpoint.layout(path, *_shape(module), stored.get(path, {}))
            for path, module in _linears(model)
        }
        for path, tensors in stored.items():
            names = sorted(set(tensors) & set(self._checkpoint.marks))
            if names and layouts.get(path) is None and not path.startswith(experts):
                raise UnreadableCheckpoint(
                    f"{path}.{names[0]} is quantized, but the model has no linear at {path}: the files do not fit config.json"
                )
        for path, layout in layouts.items():
            if layout is not None:
                if f"{path}.weight" in model.all_tied_weights_keys:
                    raise UnreadableCheckpoint(
                        f"{path} is quantized, but config.json ties its weight to another module, which is not supported"
                    )
                bias = model.get_submodule(path)._parameters["bias"]
                model.set_submodule(path, StoredLinear(layout, bias))
                # Some parents initialize the weights of their linears, which must not happen for loaded weights.
                model.get_submodule(path.rpartition(".")[0])._is_hf_initialized = True
        _check_plain(model, stored)
        patterns = set(model._keys_to_ignore_on_load_unexpected or ())
        model._keys_to_ignore_on_load_unexpected = patterns | {_UNUSED}

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        vars(model).pop("_keys_to_ignore_on_load_unexpected", None)
        for path, module in model.named_modules():
            if isinstance(module, StoredLinear):
                try:
                    module.layout.check(module.tensors)
                except UnreadableCheckpoint as error:
                    raise UnreadableCheckpoint(f"{path}: {error}") from None
        join_linears(model, self._joined)
        for setting in self._checkpoint.not_honored:
            warnings.warn(
                f"{model.name_or_path}: the config requests {setting}, which is ignored: only weights are quantized",
                stacklevel=2,
            )

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return float32 instead of float16 for models with experts, whose ops do not support float16."""
        return torch.float32 if self._has_experts and dtype is torch.float16 else dtype

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def _linears(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and path
    ]


def _shape(linear: Any) -> tuple[int, int]:
    """Return (out_features, in_features)."""
    rows, columns = linear.weight.shape
    return (columns, rows) if isinstance(linear, Conv1D) else (rows, columns)


def _tensors_of(files: Sequence[str], model: Any) -> dict[str, dict[str, Tensor]]:
    """Return the tensors in the files, {path of a module in the model: {name: tensor on the meta device}}."""
    renamings = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]
    modules = {path for path, _ in model.named_modules()}
    prefix = f"{model.base_model_prefix}."
    result: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in _headers(files):
        path, _, last = apply_renamings(name, renamings).rpartition(".")
        for candidate in (path, path.removeprefix(prefix), prefix + path):
            if candidate in modules:
                path = candidate
                break
        result[path][last] = tensor
    return dict(result)


def _headers(files: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        try:
            tensors = load_state_dict(file, map_location="meta")
        except Exception as error:  # safetensors and torch raise various exceptions
            raise UnreadableCheckpoint(f"{file} cannot be read: {error}") from error
        yield from tensors.items()


def _check_plain(model: Any, stored: dict[str, dict[str, Tensor]]) -> None:
    """Check the presence and the shapes of parameters that are not quantized. A head or a pooler may be missing for another class.

    Raises:
        UnreadableCheckpoint: a parameter is missing or has another shape.
    """
    base = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    is_same_class = type(model).__name__ in (model.config.architectures or ())
    is_joined = any(isinstance(one, WeightConverter) for one in get_model_conversion_mapping(model))
    for path, module in model.named_modules():
        is_base, is_repeated = path.startswith(base), re.search(r"\.\d+\.", path) is not None
        is_needed = is_same_class or (is_base and (is_repeated or not isinstance(module, nn.Linear)))
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{path}.{name}" if path else name
            tensor = stored.get(path, {}).get(name)
            if tensor is None:
                if is_needed and not is_joined and full_name not in model.all_tied_weights_keys:
                    raise UnreadableCheckpoint(f"{full_name} is missing in the files")
            elif (tensor.shape, tensor.is_floating_point()) != (
                parameter.shape,
                parameter.is_floating_point(),
            ):
                raise UnreadableCheckpoint(
                    f"{full_name} is {tensor.dtype} {list(tensor.shape)}: expected {parameter.dtype} {list(parameter.shape)}"
                )
