"""The blocks of GGUF files against the dequantization of the `gguf` package."""

from __future__ import annotations

import gguf
import pytest
import torch
from torch import Tensor

from hf_cpu_accel.checkpoints.gguf import FORMATS, read_blocks
from hf_cpu_accel.ops.linear import linear
from hf_cpu_accel.packing.linear import pack_affine, unpack_linear
from tests.ops.linear_cases import BOUND

# Where a block has its numbers in half precision: random bytes would be NaN now and then.
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
}


def random_rows(ggml_type: int, rows: int, blocks: int) -> Tensor:
    form = FORMATS[ggml_type]
    generator = torch.Generator().manual_seed(ggml_type)
    data = torch.randint(0, 256, (rows * blocks, form.nbytes), dtype=torch.uint8, generator=generator)
    for at in HALVES[form.name]:
        data[:, at : at + 2] = torch.randn(rows * blocks, 1, generator=generator).half().view(torch.uint8)
    return data.view(rows, -1)


@pytest.mark.parametrize("ggml_type", FORMATS, ids=[form.name for form in FORMATS.values()])
def test_all_values_are_those_of_the_file(ggml_type: int) -> None:
    form = FORMATS[ggml_type]
    assert gguf.GGMLQuantizationType(ggml_type).name == form.name
    rows = random_rows(ggml_type, 70, 3)
    weight = read_blocks(rows, ggml_type)
    expected = torch.from_numpy(gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType(ggml_type)))
    assert torch.equal(weight.dequantize(), expected)
    packed = pack_affine(weight)
    assert torch.equal(unpack_linear(packed), expected)
    input = torch.randn(5, weight.q.shape[1])
    truth = input.double() @ expected.double().T
    assert (linear(input, packed) - truth).abs().max() <= BOUND[packed.dtype] * truth.abs().max()


def test_what_is_no_matrix_of_blocks_is_refused() -> None:
    with pytest.raises(
        ValueError, match="ggml_type=16: expected one of 2 \\(Q4_0\\), 3 \\(Q4_1\\), 6 \\(Q5_0\\)"
    ):
        read_blocks(torch.zeros(1, 66, dtype=torch.uint8), 16)
    with pytest.raises(ValueError, match="expected uint8 \\[out_features, a multiple of 18\\] for Q4_0"):
        read_blocks(torch.zeros(1, 35, dtype=torch.uint8), 2)
