"""The numeric promises of docs/reference/dtypes.md on a model of real size with random weights."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, restore

TOKENS = 48


def outputs(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """[rows of real tokens, hidden_size] in float64."""
    with torch.inference_mode():
        return model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()].double()


@pytest.fixture(scope="module")
def bert() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """BERT-base with noisy biases and norms, a padded batch, and its outputs in float64."""
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(), add_pooling_layer=False).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    ids = torch.randint(1000, 30000, (2, TOKENS))
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, 31:] = 0
    return model, ids, mask, outputs(copy.deepcopy(model).double(), ids, mask)


@pytest.mark.parametrize("threads", [1, 2])
def test_float32_within_1e_4_of_float64(bert, threads: int) -> None:
    model, ids, mask, truth = bert
    torch.set_num_threads(threads)
    accelerate_for_cpu(model, dtype="float32", threads=threads)
    ours = outputs(model, ids, mask)
    restore(model)
    assert ((ours - truth).norm(dim=-1) / truth.norm(dim=-1)).max() <= 1e-4


def test_bfloat16_is_no_farther_from_the_truth_than_torchs(bert) -> None:
    model, ids, mask, truth = bert
    eager = (outputs(copy.deepcopy(model).bfloat16(), ids, mask) - truth).norm(dim=-1)
    for reduced in (
        model,
        copy.deepcopy(model).bfloat16(),
    ):  # float32 and bfloat16 activations between the layers
        accelerate_for_cpu(reduced, dtype="bfloat16")
        ours = (outputs(reduced, ids, mask) - truth).norm(dim=-1)
        restore(reduced)
        assert ours.max() <= 1.5 * eager.max()
        assert ours.mean() <= 1.5 * eager.mean()


def test_int8_rows_point_the_same_way(bert) -> None:
    model, ids, mask, truth = bert
    accelerate_for_cpu(model, dtype="int8")
    ours = outputs(model, ids, mask)
    restore(model)
    assert torch.cosine_similarity(ours, truth, dim=-1).min() >= 0.999
    assert ((ours.norm(dim=-1) / truth.norm(dim=-1)) - 1).abs().max() <= 0.05


def test_more_elements_than_memory_is_an_error_not_a_crash() -> None:
    model = nn.Sequential(nn.Linear(16, 64)).eval()
    accelerate_for_cpu(model, dtype="float32")
    with torch.no_grad(), pytest.raises((RuntimeError, MemoryError)):
        model(torch.zeros(1, 16).expand(2**58, 16))
    assert model(torch.zeros(2, 16)).shape == (2, 64)
