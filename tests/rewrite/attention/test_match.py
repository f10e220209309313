"""Attention behind the interfaces of transformers: the masks, the function, the configs, and correct decoders."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
)

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.rewrite.attention.interface import attention_forward
from hf_cpu_accel.rewrite.attention.masks import attention_mask
from tests.rewrite.families import FAMILIES, batches

B, H, L, D = 3, 4, 9, 16
RIGHT = torch.arange(L) < torch.tensor([L, 5, 1])[:, None]
PADDINGS = {"none": None, "full": torch.ones(B, L, dtype=torch.bool), "right": RIGHT, "left": RIGHT.flip(1)}


class _Masks(TorchDispatchMode):
    """Notes the masks that reach the op."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.hf_cpu_accel.attention.default:
            self.seen.append(args[3])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def op_calls():
    """The masks that reached the op."""
    with _Masks() as masks:
        yield masks.seen


def _qkv(length=L, keys=None, kv_heads=H, dtype=torch.float32):
    keys = length if keys is None else keys
    shapes = ((B, length, H, D), (B, keys, kv_heads, D), (B, keys, kv_heads, D))
    return tuple(torch.randn(shape).to(dtype).transpose(1, 2) for shape in shapes)


def _module(**attributes):
    return SimpleNamespace(**{"is_causal": False, "num_key_value_groups": 1, **attributes})


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(
    ("function", "options"),
    [
        (bidirectional_mask_function, {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}),
        (bidirectional_mask_function, {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}),
        (
            sliding_window_bidirectional_mask_function(2),
            {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True, "local_size": 2},
        ),
        (
            sliding_window_bidirectional_mask_function(50),
            {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True, "local_size": 50},
        ),
        (causal_mask_function, {"allow_is_causal_skip": True}),
        (causal_mask_function, {"allow_is_causal_skip": False}),
    ],
    ids=["bidirectional", "no skip", "sliding", "wide sliding", "causal", "causal no skip"],
)
def test_masks_are_those_of_transformers(padding, function, options):
    arguments = {
        "batch_size": B,
        "q_length": L,
        "kv_length": L,
        "attention_mask": PADDINGS[padding],
        **options,
    }
    expected = sdpa_mask(mask_function=function, **arguments)
    mask = attention_mask(mask_function=function, config=None, dtype=torch.float32, **arguments)
    if expected is None:
        assert mask is None
    else:
        assert mask.dtype == torch.bool
        assert torch.equal(mask, expected)


def test_padding_masks_are_views(op_calls):
    mask = attention_mask(
        B, L, L, attention_mask=RIGHT, allow_is_causal_skip=False, allow_is_bidirectional_skip=True
    )
    assert mask.untyped_storage().nbytes() == RIGHT.nbytes
    assert mask.data_ptr() != RIGHT.data_ptr()  # which its owner may write to before the last layer has run
    attention_forward(_module(), *_qkv(), mask)
    assert op_calls[0].shape == (B, L)
    assert op_calls[0].data_ptr() == mask.data_ptr()


def test_padding_shorter_than_the_keys():
    arguments = {
        "batch_size": B,
        "q_length": 2,
        "kv_length": L + 3,
        "attention_mask": RIGHT,
        "allow_is_causal_skip": False,
    }
    expected = sdpa_mask(mask_function=bidirectional_mask_function, **arguments)
    assert torch.equal(attention_mask(**arguments, allow_is_bidirectional_skip=True), expected)


BIAS = torch.randn(L, L, H).permute(2, 0, 1)[None]
FORWARD_CASES = {
    "plain": {},
    "scaled": {"scaling": 0.3},
    "causal": {"module": {"is_causal": True}},
    "causal by argument": {"is_causal": True},
    "not causal by argument": {"module": {"is_causal": True}, "is_causal": False},
    "decode": {"module": {"is_causal": True}, "length": 1, "keys": L},
    "prefill of a static cache": {"module": {"is_causal": True}, "length": 4, "keys": L},
    "key padding": {"mask": RIGHT[:, None, None].expand(B, 1, L, L)},
    "key padding, one batch": {"mask": RIGHT[1, None, None, None]},
    "causal and padding": {"mask": RIGHT[:, None, None] & torch.ones(L, L).tril().bool(), "module": {"is_causal": True}},
    "float mask": {"mask": torch.randn(B, 1, L, L)},
    "grouped": {"kv_heads": 2, "module": {"num_key_value_groups": 2}},
    "grouped and padding": {"kv_heads": 1, "module": {"num_key_value_groups": 4}, "mask": RIGHT[:, None, None]},
    "position bias": {"position_bias": BIAS},
    "position bias and padding": {"position_bias": BIAS, "mask": RIGHT[:, None, None].expand(B, 1, L, L)},
    "position bias and float mask": {"position_bias": BIAS, "mask": torch.randn(B, 1, L, L)},
    "position bias, causal": {"position_bias": BIAS, "module": {"is_causal": True}},
    "position bias, static cache": {
        "position_bias": BIAS[:, :, :4], "length": 4, "keys": L, "module": {"is_causal": True}
    },
    "paged or unknown extras that are off": {"cache": None, "output_attentions": False, "sliding_window": 5},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", FORWARD_CASES)
def test_forward_gives_what_sdpa_gives(case, dtype, op_calls):
    options = dict(FORWARD_CASES[case])
    module = _module(**options.pop("module", {}))
    mask, bias = options.pop("mask", None), options.pop("position_bias", None)
    query, key, value = _qkv(
        options.pop("length", L), options.pop("keys", None), options.pop("kv_heads", H), dtype
    )
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype)
    if bias is not None:
        options["position_bias"] = bias.to(dtype)
    expected = sdpa_attention_forward(module, query, key, value, mask, **options)
    given = attention_forward(module, query, key, value, mask, **options)
    assert len(op_calls) == 1
    assert given[1] is None
    assert given[0].is_contiguous()
    tolerance = 1e-5 if dtype is torch.float32 else 0.03
    torch.testing.assert_close(given[0], expected[0], rtol=tolerance, atol=tolerance)


def test_a_sequence_of_padding_only_gives_zeros_as_sdpa_does():
    mask = torch.ones(B, L, dtype=torch.bool)
    mask[1] = False
    mask = mask[:, None, None].expand(B, 1, L, L)
    query, key, value = _qkv()
    output = attention_forward(_module(), query, key, value, mask)[0]
    assert torch.equal(output[1], torch.zeros_like(output[1]))
    torch.testing.assert_close(
        output, sdpa_attention_forward(_module(), query, key, value, mask)[0], rtol=1e-4, atol=1e-5
    )


def test_what_the_op_cannot_do_goes_to_sdpa(op_calls):
    query, key, value = _qkv()
    attention_forward(_module(), query, key, value, None, dropout=0.5)
    attention_forward(_module(), query.double(), key.double(), value.double(), None)
    attention_forward(_module(), query[:1], key, value, None)
    output = attention_forward(_module(), query.requires_grad_(), key, value, None)[0]
    output.sum().backward()
    assert query.grad is not None
    with pytest.raises(ValueError, match="softcap"):
        attention_forward(_module(), query, key, value, None, softcap=30.0)
    assert op_calls == []
    with torch.no_grad():
        attention_forward(_module(), query, key, value, None)
    assert len(op_calls) == 1


def test_the_op_serves_padded_batches_with_a_key_padding_mask(op_calls):
    family = FAMILIES["bert"]
    model = accelerate_for_cpu(family.build(), dtype="float32")
    for (
        module
    ) in model.modules():  # a hook inside a fused layer takes it apart: its attention runs on its own
        module.register_forward_pre_hook(lambda *_: None)
    op_calls.clear()
    for name, batch in batches().items():
        family.run(model, batch)
        masks = [op_calls.pop() for _ in range(2)]
        assert op_calls == []
        if name in ("full", "single"):
            assert masks == [None, None]
        else:
            assert all(torch.equal(mask, batch["attention_mask"].bool()) for mask in masks)
