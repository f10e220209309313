"""The diffusers quantizer for `quant_method: "cpu_accel"`, which loads packed folders. Importing this imports diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.quantizers.quantization_config import QuantizationConfigMixin

from hf_cpu_accel.frontends.packed_config import ChecksFields, PackedFields
from hf_cpu_accel.frontends.packed_loading import PackedLoading
from hf_cpu_accel.packing.packed_file import read_packed


class _Method(str):
    """The name of the method, with the interface of an enumeration member of diffusers."""

    @property
    def value(self) -> str:
        """Return the name."""
        return str(self)


METHOD = _Method("cpu_accel")


class PackedConfig(PackedFields, QuantizationConfigMixin):
    """`quantization_config` in the config.json of a packed model of diffusers."""

    method = METHOD

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "quant_method": str(METHOD)}

    to_diff_dict = to_dict  # the base class uses it for its representation


class PackedQuantizer(ChecksFields, DiffusersQuantizer):
    """Map the packed weights, let diffusers load the other parameters of the file, and accelerate the model."""

    requires_calibration = True  # it loads packed weights, but does not pack
    reads_packed_folders = True
    use_keep_in_fp32_modules = True
    _loading: PackedLoading | None = None

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        """Open the file, and return the names of the parameters that diffusers loads."""
        with torch.device("cpu"):
            file = read_packed(Path(checkpoint_files[0]))
        self._loading = PackedLoading(file)
        return list(file.plain)

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters that are not packed."""
        assert self._loading is not None
        return {name: tensor for name, tensor in state_dict.items() if name in self._loading.plain}

    def check_if_quantized_param(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        """Remove the packed parameters from the model before loading.

        Raises:
            RuntimeError: a version of diffusers that did not ask for the names of the parameters.
        """
        if self._loading is None:
            raise RuntimeError(
                f"packed diffusers models need diffusers 0.39 or newer, but {diffusers.__version__} is installed: run "
                "pip install --upgrade diffusers"
            )
        self._loading.begin(model)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        assert self._loading is not None
        loading, self._loading = self._loading, None
        loading.finish(model.eval())

    @property
    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False
