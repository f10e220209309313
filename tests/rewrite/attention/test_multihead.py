"""`nn.MultiheadAttention` with packed projections returns the same as before."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.attention.multihead import PackedMultiheadAttention
from hf_cpu_accel.tolerance import FORMULA

FEATURES, HEADS = 64, 4
BOUNDS = {"float32": 2e-5, "bfloat16": 0.02, "int8": 0.1}


class Attending(nn.Module):
    """One attention in a module, as a target has to have it."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(FEATURES, HEADS, **options)
        for bias in (self.attention.in_proj_bias, self.attention.out_proj.bias):
            if bias is not None:
                nn.init.normal_(bias)

    def forward(self, *args, **kwargs):
        return self.attention(*args, **kwargs)


def states(number: int, length: int, batch_first: bool = True, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    made = torch.randn(batch, length, FEATURES, generator=generator)
    return made if batch_first else made.transpose(0, 1)


def masks(name: str, q_len: int, kv_len: int) -> dict[str, Tensor]:
    padding = torch.zeros(2, kv_len, dtype=torch.bool)
    padding[1, -2:] = True
    later = torch.ones(q_len, kv_len).triu(1).bool()
    bias = torch.randn(q_len, kv_len, generator=torch.Generator().manual_seed(7))
    heads = torch.randn(2 * HEADS, q_len, kv_len, generator=torch.Generator().manual_seed(8))
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "later": {"attn_mask": later},
        "later and padding": {"attn_mask": later, "key_padding_mask": padding},
        "bias": {"attn_mask": bias},
        "bias of heads, and padding": {
            "attn_mask": heads,
            "key_padding_mask": torch.zeros(2, kv_len).masked_fill_(padding, float("-inf")),
        },
    }[name]


def error(given: Tensor, expected: Tensor) -> float:
    assert given.shape == expected.shape
    assert given.dtype is expected.dtype
    return float((given - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("weights", ["none", "averaged", "of heads"])
@pytest.mark.parametrize(
    "mask", ["none", "padding", "later", "later and padding", "bias", "bias of heads, and padding"]
)
@torch.no_grad()
def test_it_gives_the_same(dtype: str, batch_first: bool, weights: str, mask: str) -> None:
    model = Attending(batch_first=batch_first).eval()
    query, memory, other = (states(number, length, batch_first) for number, length in enumerate((7, 9, 9)))
    calls = [(query, query, query), (query, memory, memory), (query, memory, other)]
    options = {"need_weights": weights != "none", "average_attn_weights": weights == "averaged"}
    given = [{**options, **masks(mask, 7, 7 if key is query else 9)} for _, key, _ in calls]
    expected = [model(*call, **more) for call, more in zip(calls, given, strict=True)]
    accelerate_for_cpu(model, dtype=dtype)
    assert isinstance(model.attention, PackedMultiheadAttention)
    assert isinstance(model.attention, nn.MultiheadAttention)
    for call, more, (output, probabilities) in zip(calls, given, expected, strict=True):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            ours, shares = model(*call, **more)
            assert error(ours, output) <= BOUNDS[dtype]
            assert (shares is None) == (probabilities is None)
            if shares is not None:
                assert error(shares, probabilities) <= BOUNDS[dtype]
    restore(model)
    assert torch.equal(model(*calls[0], **given[0])[0], expected[0][0])


@torch.no_grad()
def test_one_sequence_and_no_biases() -> None:
    model = Attending(bias=False).eval()
    query, memory = states(0, 5, batch=1)[0], states(1, 6, batch=1)[0]
    later = torch.ones(5, 6).triu(1).bool()
    calls = [((query, query, query), {}), ((query, memory, memory), {"attn_mask": later})]
    expected = [model(*args, **kwargs) for args, kwargs in calls]
    accelerate_for_cpu(model, dtype="float32")
    for (args, kwargs), outputs in zip(calls, expected, strict=True):
        for ours, theirs in zip(model(*args, **kwargs), outputs, strict=True):
            assert error(ours, theirs) <= BOUNDS["float32"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@torch.no_grad()
def test_transformers_of_torch(dtype: str, batch_first: bool, norm_first: bool) -> None:
    """Their encoder layers would read the weights instead of calling the parts, and make nested tensors of padded batches."""
    torch.manual_seed(0)
    options = {"batch_first": batch_first, "norm_first": norm_first}
    model = nn.Transformer(FEATURES, HEADS, 2, 2, 96, **options).eval()
    source, target = states(0, 9, batch_first), states(1, 6, batch_first)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    masks["tgt_mask"] = nn.Transformer.generate_square_subsequent_mask(6)
    calls = [({}, source), ({**masks, "tgt_is_causal": True}, source)]
    expected = [model(given, target, **kwargs) for kwargs, given in calls]
    accelerate_for_cpu(model, dtype=dtype)
    counts = explain(model).counts()
    assert counts == {"multi-head attention": 6, "linear": 8, "recorded layer": 4}
    for _ in range(3):  # layers are recorded in the first call
        for (kwargs, given), output in zip(calls, expected, strict=True):
            assert error(model(given, target, **kwargs), output) <= BOUNDS[dtype]
    restore(model)
    for (kwargs, given), output in zip(calls, expected, strict=True):
        assert torch.equal(model(given, target, **kwargs), output)


@pytest.mark.parametrize("originals", ["memory", "disk"])
@torch.no_grad()
def test_its_weights_are_known_under_their_names(originals: str) -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(FEATURES, HEADS, 96, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(states(0, 5))
    accelerate_for_cpu(model, dtype="int8", originals=originals)
    state = model.state_dict()
    assert list(state) == list(before)
    name = "layers.0.self_attn.in_proj_weight"
    attention = model.layers[0].self_attn
    assert attention.in_proj_weight.shape == state[name].shape == before[name].shape
    if originals == "memory":
        assert all(torch.equal(value, before[key]) for key, value in state.items())
    else:
        assert 0 < error(state[name], before[name]) <= 0.02
    assert error(model(states(0, 5)), expected) <= BOUNDS["int8"]
    restore(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@torch.no_grad()
def test_copies_answer_alike_and_can_be_restored(copied) -> None:
    model = Attending(batch_first=True).eval()
    x = states(0, 5)
    original = model(x, x, x)[0]
    accelerate_for_cpu(model, dtype="int8", originals="memory")
    expected, other = model(x, x, x)[0], copied(model)
    assert torch.equal(other(x, x, x)[0], expected)
    assert torch.equal(restore(other)(x, x, x)[0], original)


@torch.no_grad()
def test_a_bias_that_is_written_to_counts() -> None:
    model = Attending(batch_first=True).eval()
    x = states(0, 5)
    accelerate_for_cpu(model, dtype="float32")
    model(x, x, x)
    model.attention.in_proj_bias.data.mul_(2)
    after = model(x, x, x)[0]
    assert error(after, restore(model)(x, x, x)[0]) <= BOUNDS["float32"]


@torch.no_grad()
def test_it_follows_casts() -> None:
    model = Attending(batch_first=True).eval()
    x = states(0, 5)
    expected = model(x, x, x, need_weights=False)[0]
    accelerate_for_cpu(model, dtype="float32").to(torch.bfloat16)
    assert model.attention.in_proj_weight.dtype is torch.bfloat16
    y = x.bfloat16()
    output = model(y, y, y, need_weights=False)[0]
    assert output.dtype is torch.bfloat16
    assert error(output.float(), expected) <= BOUNDS["bfloat16"]


@torch.no_grad()
def test_what_it_does_not_take_goes_to_torch() -> None:
    model = Attending(batch_first=True).eval()
    x = states(0, 5)
    seen = []
    expected = model(x, x, x)[0]
    accelerate_for_cpu(model, dtype="float32")
    hook = model.attention.out_proj.register_forward_hook(lambda *args: seen.append(args))
    assert error(model(x, x, x)[0], expected) <= FORMULA.of(torch.float32)
    assert not seen  # as torch, which reads the weight
    hook.remove()
    with pytest.raises(RuntimeError, match="attn_mask"):
        model(x, x, x, is_causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert error(model(x, x, x)[0].float(), expected) <= BOUNDS["bfloat16"]


@pytest.mark.parametrize(
    "masks",
    [
        {"attn_mask": torch.zeros(9, 7)},  # as many numbers as there are, in another order
        {"attn_mask": torch.zeros(HEADS, 7, 9)},
        {"attn_mask": torch.zeros(7, 9, dtype=torch.int)},
        {"key_padding_mask": torch.zeros(9, 2, dtype=torch.bool)},
    ],
)
@torch.no_grad()
def test_masks_that_torch_refuses_are_refused(masks: dict[str, Tensor]) -> None:
    model = accelerate_for_cpu(Attending(batch_first=True).eval(), dtype="float32")
    query, memory = states(0, 7), states(1, 9)
    for accelerated in (True, False):
        with pytest.raises((RuntimeError, AssertionError)):
            model(query, memory, memory, **masks)
        if accelerated:
            restore(model)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kdim": 48}, "differs from embed_dim"),
        ({"add_bias_kv": True}, "add_bias_kv or add_zero_attn"),
        ({"add_zero_attn": True}, "add_bias_kv or add_zero_attn"),
    ],
)
def test_other_forms_are_left(options: dict, reason: str) -> None:
    plan = explain(accelerate_for_cpu(Attending(**options).eval(), dtype="int8"))
    assert plan.counts() == {}
    assert reason in next(item.reason for item in plan.left if item.name == "attention")


def test_odd_widths_and_shared_weights_are_left() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(40, 4), nn.MultiheadAttention(64, 4)]).eval()
    model.append(nn.MultiheadAttention(64, 4).eval())
    model[2].in_proj_weight = model[1].in_proj_weight
    reasons = {item.name: item.reason for item in explain(accelerate_for_cpu(model, dtype="int8")).left}
    assert "multiples of 32" in reasons["0"]
    assert "shares its weights" in reasons["1"]
