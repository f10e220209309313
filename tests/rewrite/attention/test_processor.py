"""Attention of diffusers: the op serves the attention calls of processors, and nothing else changes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.providers.attention import LONG
from hf_cpu_accel.rewrite.attention import processor
from hf_cpu_accel.rewrite.attention.processor import AttentionConfig, OurAttention, dot_product_attention

ops = torch.ops.hf_cpu_accel


class Block(nn.Module):
    """One attention with a parent, as in a model."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.attn = Attention(query_dim=32, heads=2, dim_head=16, cross_attention_dim=24, **options)

    def forward(self, hidden_states: Tensor, text: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attn(hidden_states, encoder_hidden_states=text, attention_mask=mask)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the queries that our op was given."""
    seen: list[tuple[int, ...]] = []

    def attention(query: Tensor, *args: object, **options: object) -> Tensor:
        seen.append(tuple(query.shape))
        return original(query, *args, **options)

    original = processor.attention
    monkeypatch.setattr(processor, "attention", attention)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["plain", "causal", "bool", "queries_by_keys", "added", "grouped", "scaled"])
def test_it_is_torchs_function(case: str, dtype: torch.dtype, counted: list[tuple[int, ...]]) -> None:
    query, key, value = (torch.randn(2, 7, 4, 20).to(dtype).transpose(1, 2) for _ in range(3))
    options: dict[str, object] = {}
    if case == "causal":
        options["is_causal"] = True
    elif case == "bool":
        options["attn_mask"] = torch.rand(2, 1, 1, 7) < 0.7
    elif case == "queries_by_keys":  # two dimensions: not the padding of a batch
        options["attn_mask"] = torch.ones(7, 7, dtype=torch.bool).tril()
    elif case == "added":
        options["attn_mask"] = torch.randn(2, 4, 7, 7).to(dtype)
    elif case == "grouped":
        key, value, options["enable_gqa"] = key[:, :2], value[:, :2], True
    elif case == "scaled":
        options["scale"] = 0.7
    expected = functional.scaled_dot_product_attention(query, key, value, **options)  # type: ignore[arg-type]
    with OurAttention(AttentionConfig()):
        given = functional.scaled_dot_product_attention(query, key, value, **options)  # type: ignore[arg-type]
    assert counted == [(2, 4, 7, 20)]
    tolerance = 2e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(given, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "case", ["gradient", "float16", "three dimensions", "causal and longer", "broadcast"]
)
def test_the_rest_is_left_to_torch(case: str, counted: list[tuple[int, ...]]) -> None:
    query, key, value = torch.randn(3, 2, 2, 5, 8).unbind()
    causal = False
    if case == "gradient":
        query.requires_grad_()
    elif case == "float16":
        query, key, value = query.half(), key.half(), value.half()
    elif case == "three dimensions":
        query, key, value = query[0], key[0], value[0]
    elif case == "causal and longer":
        query, causal = query[:, :, :3], True
    elif case == "broadcast":
        key, value = key[:1], value[:1]
    expected = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
    assert torch.equal(dot_product_attention(query, key, value, is_causal=causal), expected)
    assert not counted


@pytest.mark.parametrize("faster", [True, False])
def test_long_float32_goes_to_whoever_is_faster(
    faster: bool, counted: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "torch_is_faster", lambda head_dim: faster)
    query, key, value = torch.randn(3, 1, 2, LONG, 8).unbind()
    expected = functional.scaled_dot_product_attention(query, key, value)
    for manner in (AttentionConfig(measured=True), AttentionConfig(measured=False)):
        given = dot_product_attention(query, key, value, config=manner)
        torch.testing.assert_close(given, expected, atol=2e-5, rtol=2e-5)
    assert len(counted) == (1 if faster else 2)


def test_narrow_models_attend_over_long_sequences_in_bfloat16(counted: list[tuple[int, ...]]) -> None:
    query, key, value = torch.randn(3, 1, 2, LONG, 8).unbind()
    mask = torch.randn(1, 1, LONG, LONG)
    expected = functional.scaled_dot_product_attention(query, key, value, mask)
    given = dot_product_attention(
        query, key, value, mask, config=AttentionConfig(bf16_intermediates=True, measured=True)
    )
    assert given.dtype is torch.float32
    assert not torch.allclose(given, expected, atol=1e-5)
    torch.testing.assert_close(given, expected, atol=2e-2, rtol=2e-2)
    assert len(counted) == 1


def test_heads_that_do_not_fit_are_an_error_as_in_torch() -> None:
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(RuntimeError):
        dot_product_attention(query, key, key)


def test_a_processor_set_later_is_served_too(counted: list[tuple[int, ...]]) -> None:
    class Doubled(AttnProcessor2_0):
        def __call__(self, *args: object, **kwargs: object) -> Tensor:
            return 2 * super().__call__(*args, **kwargs)

    block, inputs = Block().eval(), (torch.randn(2, 5, 32), torch.randn(2, 3, 24))
    expected = block(*inputs).detach()
    accelerate_for_cpu(block, dtype="float32")
    counted.clear()  # the comparison before it was put in place
    torch.testing.assert_close(block(*inputs), expected)
    block.attn.set_processor(Doubled())
    torch.testing.assert_close(block(*inputs), 2 * expected)
    assert len(counted) == 2
    mask = torch.zeros(2, 1, 3)
    mask[1, 0, 2] = -10000.0
    fast = block(*inputs, mask)
    restore(block)
    assert len(counted) == 3
    assert "forward" not in vars(block.attn)
    torch.testing.assert_close(fast, block(*inputs, mask).detach())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_attend_with_their_own_weights(duplicate: object) -> None:
    block, inputs = Block().eval(), (torch.randn(2, 5, 32), torch.randn(2, 3, 24))
    accelerate_for_cpu(block, dtype="float32")
    expected = block(*inputs)
    other = duplicate(block)  # type: ignore[operator]
    assert other.attn.forward.__self__ is other.attn
    restore(block)
    torch.testing.assert_close(other(*inputs), expected)


def test_what_computes_attention_itself_is_left_and_says_so() -> None:
    block = Block(processor=AttnProcessor()).eval()
    accelerate_for_cpu(block, dtype="float32")
    (item,) = [item for item in explain(block).items if item.structure == "attention"]
    assert item.reason is not None
    assert "AttnProcessor does not call scaled_dot_product_attention" in item.reason
