"""The transformers quantizer for `quant_method: "cpu_accel"`, which loads packed folders. Importing this imports transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_cpu_accel.frontends.packed_config import ChecksFields, PackedFields
from hf_cpu_accel.frontends.packed_loading import PackedLoading
from hf_cpu_accel.hosts.tensor_parallel import is_divided, is_to_be_divided
from hf_cpu_accel.packing.packed_file import FILE_NAME, read_packed

METHOD = "cpu_accel"


class PackedConfig(PackedFields, QuantizationConfigMixin):
    """`quantization_config` in the config.json of a packed model of transformers."""

    method = METHOD


class PackedQuantizer(ChecksFields, HfQuantizer):
    """Map the packed weights, let transformers load the other parameters of the file, and accelerate the model."""

    requires_calibration = True  # it loads packed weights, but does not pack
    reads_packed_folders = True
    _loading: PackedLoading | None = None

    def update_attn_implementation(self, config: Any) -> Any:
        """Set the name of the weights file; transformers calls this before it searches for files.

        A packed folder has no model.safetensors, so that transformers without hf_cpu_accel does not load a checkpoint with missing
        weights.

        Raises:
            ValueError: the model is to be divided among processes.
        """
        if is_to_be_divided(config):
            raise _not_divisible(FILE_NAME)
        config.transformers_weights = FILE_NAME
        return config

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        assert checkpoint_files
        with torch.device("cpu"):  # transformers builds the model on the meta device
            self._loading = PackedLoading(read_packed(Path(checkpoint_files[0])))
            self._loading.begin(model, tuple(model.all_tied_weights_keys))
        patterns = set(model._keys_to_ignore_on_load_unexpected or ())
        model._keys_to_ignore_on_load_unexpected = patterns | {
            r"\.packed(_scale|_lost|_permutation)?$",
            r"^padding\.\d+$",
        }

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        assert self._loading is not None
        vars(model).pop("_keys_to_ignore_on_load_unexpected", None)
        vars(model.config).pop("transformers_weights", None)
        loading, self._loading = self._loading, None
        if any(
            map(is_divided, model.parameters())
        ):  # some versions of transformers divide without a setting in the config
            raise _not_divisible(loading.path)
        loading.finish(model)

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> list[Any]:
        """Return no conversions: the names in the file are those of the model."""
        return []

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def _not_divisible(file: object) -> ValueError:
    return ValueError(
        f"{file} contains packed weights, which cannot be divided among processes: load the original checkpoint with "
        "distributed_config and cpu_optimize"
    )
