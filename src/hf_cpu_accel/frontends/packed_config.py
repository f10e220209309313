"""What `quantization_config` in the config of a packed folder says, and what is asked of it before anything is loaded.

To be mixed into the classes of transformers and of diffusers, which have the same names.
"""

from __future__ import annotations

from typing import Any

from hf_cpu_accel.frontends.placement import check_placement
from hf_cpu_accel.packing.packed_file import FORMAT_VERSION, check_version


class PackedFields:
    """
    Args:
        dtype: what the weights are packed as.
        format_version: of the file.
        library_version: of hf_cpu_accel, when it was written.
    """

    method: Any

    def __init__(
        self, dtype: str = "", format_version: int = FORMAT_VERSION, library_version: str = "", **others: Any
    ) -> None:
        self.quant_method = self.method
        self.dtype = dtype
        self.format_version = format_version
        self.library_version = library_version


class ChecksFields:
    """A quantizer of such a config."""

    quantization_config: Any

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """
        Raises:
            ValueError: a place off the CPU, or a format that is newer than this version.
        """
        check_placement(device_map=device_map, asked="a packed folder")
        check_version(self.quantization_config.format_version, self.quantization_config.library_version)
