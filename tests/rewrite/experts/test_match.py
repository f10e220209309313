"""Modules of experts: every layout and use of their weights is matched, packed and restored."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.check import row_error
from hf_cpu_accel.rewrite.experts.form import read_experts
from hf_cpu_accel.rewrite.experts.layer import PackedExperts
from hf_cpu_accel.rewrite.experts.match import STRUCTURE
from tests.rewrite.decoder.decoder_families import DECODERS
from tests.rewrite.encoder_families import dinov3, hubert

COUNT, WIDTH, FEATURES = 5, 32, 64


class Experts(nn.Module):
    """All layouts that transformers knows, and the two ways to gate."""

    def __init__(
        self,
        *,
        transposed: bool = False,
        interleaved: bool = False,
        biases: bool = False,
        gated: bool = True,
        limit: float = 0.0,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        self.transposed, self.interleaved, self.gated, self.limit = transposed, interleaved, gated, limit
        self.act_fn = nn.SiLU() if not limit else None
        for name, rows, columns in (("up", (1 + gated) * width, FEATURES), ("down", FEATURES, width)):
            shape = (COUNT, columns, rows) if transposed else (COUNT, rows, columns)
            setattr(self, f"{name}_proj", nn.Parameter(torch.randn(shape) / columns**0.5))
            if biases:
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(COUNT, rows)))

    def _linear(self, x: Tensor, name: str, expert: int) -> Tensor:
        weight = getattr(self, f"{name}_proj")[expert]
        bias = getattr(self, f"{name}_bias", None)
        return F.linear(x, weight.T if self.transposed else weight, None if bias is None else bias[expert])

    def forward(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(hidden_states)
        for expert in range(COUNT):
            token, slot = torch.where(index == expert)
            hidden = self._linear(hidden_states[token], "up", expert)
            if self.gated:
                parts = (hidden[..., ::2], hidden[..., 1::2]) if self.interleaved else hidden.chunk(2, dim=-1)
                gate, up = parts
                if self.limit:
                    gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit) + 1
                    hidden = gate * torch.sigmoid(1.702 * gate) * up
                else:
                    hidden = self.act_fn(gate) * up
            else:
                hidden = self.act_fn(hidden)
            output.index_add_(0, token, self._linear(hidden, "down", expert) * weights[token, slot, None])
        return output


class Block(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *args: Tensor) -> Tensor:
        return self.experts(*args)


FORMS = {
    "mixtral": {},
    "biases": {"biases": True},
    "interleaved": {"interleaved": True},
    "transposed": {"transposed": True},
    "gpt-oss": {"transposed": True, "interleaved": True, "biases": True, "limit": 7.0},
    "plain": {"gated": False},
}


def block_of(**options: object) -> Block:
    torch.manual_seed(0)
    return Block(Experts(**options)).eval()  # type: ignore[arg-type]


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, FEATURES, generator=generator)
    index = torch.rand(9, COUNT, generator=generator).topk(2).indices
    return x * 3, index, torch.rand(9, 2, generator=generator)


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
@torch.no_grad()
def test_forms(options: dict[str, object]) -> None:
    block = block_of(**options)
    original, expected = block.experts, block(*inputs())
    state = {name: value.clone() for name, value in block.state_dict().items()}
    accelerate_for_cpu(block, dtype="float32")
    assert isinstance(block.experts, PackedExperts)
    assert isinstance(block.experts, Experts)
    assert row_error(block(*inputs()), expected) <= 1e-5
    packed = block.state_dict()
    assert list(packed) == list(state)
    assert all(torch.equal(packed[name], state[name]) for name in state)
    assert block.experts.up_proj.shape == state["experts.up_proj"].shape
    assert torch.equal(block.experts.up_proj[1], state["experts.up_proj"][1])
    assert original.up_proj.numel() == original.down_proj.numel() == 0  # not held twice
    restore(block)
    assert block.experts is original
    assert torch.equal(block(*inputs()), expected)


@pytest.mark.parametrize(
    ("dtype", "bound"), [("bfloat16", 1e-2), ("int8", 5e-2), ("int8-weight", 2e-2), ("int4", 0.3)]
)
@torch.no_grad()
def test_reduced_precision_and_back(dtype: str, bound: float) -> None:
    block = block_of()
    expected = block(*inputs())
    accelerate_for_cpu(block, dtype=dtype)
    assert row_error(block(*inputs()), expected) <= bound
    (item,) = (item for item in explain(block).items if item.structure == STRUCTURE)
    assert (item.op, item.dtype, item.reason) == ("experts_ffn", dtype, None)
    assert item.packed_bytes == sum(weight.nbytes for weight in block.experts.packed.values())
    restore(block)
    assert torch.equal(block(*inputs()), expected)


@torch.no_grad()
def test_originals_in_memory_stay_parameters() -> None:
    block = block_of()
    parameters = list(block.parameters())
    accelerate_for_cpu(block, dtype="int4", originals="memory")
    assert [id(p) for p in block.parameters()] == [id(p) for p in parameters]
    assert block.experts.up_proj is parameters[0]


@torch.no_grad()
def test_copies_pickles_and_casts() -> None:
    block = block_of(biases=True)
    expected = block(*inputs())
    accelerate_for_cpu(block, dtype="float32")
    block(*inputs())
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert row_error(other(*inputs()), expected) <= 1e-5
        restore(other)
        assert torch.equal(other(*inputs()), expected)
    block.to(torch.bfloat16)
    x, index, weights = inputs()
    output = block(x.bfloat16(), index, weights.bfloat16())
    assert output.dtype is torch.bfloat16
    assert row_error(output.float(), expected) <= 2e-2
    assert block.state_dict()["experts.up_proj"].dtype is torch.bfloat16
    with pytest.raises(RuntimeError, match="cannot load a state_dict"):
        block.experts.load_state_dict({})
    with pytest.raises(RuntimeError, match="read-only"):
        block.experts.up_proj.zero_()


@torch.no_grad()
def test_what_is_left_says_why() -> None:
    def left(block: Block, **options: object) -> str:
        expected = block(*inputs())
        accelerate_for_cpu(block, dtype="float32", **options)
        assert torch.equal(block(*inputs()), expected)
        (item,) = (item for item in explain(block).items if item.structure == STRUCTURE)
        assert item.reason is not None
        return item.reason

    assert "multiples of 32" in left(block_of(width=24))
    assert left(block_of(), skip_modules=["experts"]) == "skip_modules"
    hooked = block_of()
    hooked.experts.register_forward_hook(lambda *_: None)
    assert "hooks" in left(hooked)
    odd = block_of()
    odd.experts.act_fn = nn.Softsign().eval()
    assert "does not match" in left(odd)


class SeparateGate(nn.Module):
    """Experts in a layout that the op does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.randn(COUNT, WIDTH, FEATURES)) for _ in range(2))
        self.down = nn.Parameter(torch.randn(COUNT, FEATURES, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (torch.einsum("ecf,ef->ec", weight, x) for weight in (self.gate, self.up))
        return torch.einsum("ecf,ef->ec", self.down, F.silu(gate) * up)


@pytest.mark.parametrize("build", [dinov3, hubert])
def test_learned_tokens_and_kernels_of_convolutions_are_no_experts(build: Callable[[], nn.Module]) -> None:
    """They have three dimensions, too; what holds them is left because no rule knows it."""
    model = build()
    holders = {
        name: module
        for name, module in model.named_modules()
        if sum(p.dim() == 3 for p in module.parameters(recurse=False)) >= 2
    }
    assert holders
    items = {item.name: item for item in explain(accelerate_for_cpu(model, dtype="float32")).items}
    assert all(items[name].structure == type(holders[name]).__name__ for name in holders)
    assert not any(item.structure == STRUCTURE for item in items.values())


def test_experts_in_an_unknown_layout_are_called_experts() -> None:
    block = Block(SeparateGate()).eval()
    (item,) = explain(accelerate_for_cpu(block, dtype="float32")).items
    assert item.structure == STRUCTURE
    assert "does not match" in item.reason


def test_a_limit_is_told_from_none() -> None:
    for limit in (0.5, 7.0):
        form = read_experts(Experts(limit=limit))
        assert form is not None
        assert (form.limit, form.activation) == (limit, "quick_gelu")


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
@torch.no_grad()
def test_every_implementation_of_transformers_gives_way(name: str) -> None:
    """A model that asks for another way to compute experts is served by ours, and gets its own back."""
    model = DECODERS[name].build()
    ids = torch.randint(3, 100, (2, 5), generator=torch.Generator().manual_seed(0))
    for implementation in ("eager", "batched_mm"):
        model.set_experts_implementation(implementation)
        expected = model(ids).logits
        accelerate_for_cpu(model, dtype="float32")
        assert sum(item.op == "experts_ffn" for item in explain(model).items) == 3
        assert row_error(model(ids).logits, expected) <= 1e-4
        restore(model)
        assert torch.equal(model(ids).logits, expected)
