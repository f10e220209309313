"""conv2d over images that hold NaN."""

from __future__ import annotations

import torch

from hf_cpu_accel.ops.convolution import conv2d_reference
from hf_cpu_accel.packing.convolution import pack_conv2d
from tests.ops.convolution.test_convolution import Case


def test_nan_spoils_windows_beside_the_image_too() -> None:
    image = Case(channels=64).image()
    image[0, 3, 4, 4] = torch.nan
    packed = pack_conv2d(Case(channels=64, kernel_size=(1, 4)).weight(), "int8")
    arguments = (packed.data, packed.scale, None, None, 40, [1, 4], [1, 1], [1, 3], [1, 1], "none")
    rows = image.permute(0, 2, 3, 1)
    for op in (torch.ops.hf_cpu_accel.conv2d, conv2d_reference):
        spoilt = op(rows, *arguments).isnan()
        assert spoilt[0].all()
        assert not spoilt[1].any()
