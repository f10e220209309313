"""The `quantization_config` of a packed folder, and its checks before anything is loaded.

The classes are mixed into classes of transformers and diffusers, which have the same interface.
"""

from __future__ import annotations

from typing import Any

from hf_cpu_accel.frontends.placement import check_placement
from hf_cpu_accel.packing.packed_file import FORMAT_VERSION, check_version


class PackedFields:
    """The fields of the config.

    Args:
        dtype: dtype of the packed weights.
        format_version: version of the file format.
        library_version: version of hf_cpu_accel that wrote the file.
        ignored: further fields, which are ignored.
    """

    method: Any

    def __init__(
        self, dtype: str = "", format_version: int = FORMAT_VERSION, library_version: str = "", **ignored: Any
    ) -> None:
        self.quant_method = self.method
        self.dtype = dtype
        self.format_version = format_version
        self.library_version = library_version


class ChecksFields:
    """A quantizer for this config."""

    quantization_config: Any

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Check the device and the version of the format.

        Raises:
            ValueError: another device than the CPU, or a format that is newer than this version.
        """
        check_placement(device_map=device_map, feature="a packed folder")
        check_version(self.quantization_config.format_version, self.quantization_config.library_version)
