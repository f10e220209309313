"""Group norms on their op, with a following SiLU."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.rewrite.norm import group_norm as rule


class Block(nn.Module):
    """Uses its activation twice, as residual blocks do: behind the norm, and for an embedding."""

    def __init__(self, *, scaled: bool = False) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, 16)
        self.act = nn.SiLU()
        self.scaled = scaled

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        hidden = self.norm(x)
        if self.scaled:
            hidden = hidden * 2 + 1
        return self.act(hidden) + self.act(embedding)[:, :, None, None]


def parts() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 16, 5, 7), torch.randn(2, 16)


@pytest.fixture
def activations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What our op was asked for."""
    seen: list[str] = []
    original = rule.group_norm

    def recorded(*args: object, activation: str, **options: object) -> Tensor:
        seen.append(activation)
        return original(*args, activation=activation, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(rule, "group_norm", recorded)
    return seen


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("scaled", [False, True])
def test_silu_is_taken_along_only_where_it_comes_next(
    scaled: bool, memory_format: torch.memory_format, activations: list[str]
) -> None:
    model = Block(scaled=scaled).eval()
    x, embedding = parts()
    x = x.to(memory_format=memory_format)
    expected = model(x, embedding).detach()
    accelerate_for_cpu(model)
    activations.clear()  # the comparison before it was put in place
    output = model(x, embedding)
    assert activations == ["none" if scaled else "silu"]
    assert output.is_contiguous(memory_format=memory_format)
    assert type(output) is Tensor
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    (item,) = explain(model).replaced
    assert item.structure == "group norm + SiLU"
    restore(model)
    assert type(model.norm) is nn.GroupNorm
    torch.testing.assert_close(model(x, embedding).detach(), expected, rtol=0, atol=0)


def test_without_an_activation_beside_it_there_is_nothing_to_wait_for() -> None:
    model = nn.Sequential(nn.Conv1d(8, 8, 1), nn.GroupNorm(2, 8)).eval()
    accelerate_for_cpu(model)
    assert not isinstance(model(torch.randn(2, 8, 3)), LazyTensor)


def test_a_pending_norm_is_a_tensor_like_any_other() -> None:
    model, (x, _) = Block().eval(), parts()
    expected = model.norm(x).detach()
    accelerate_for_cpu(model)
    for read in (lambda t: t + 0, lambda t: torch.cat([t]), lambda t: t.clone(), lambda t: t.view(2, 16, 35)):
        pending = model.norm(x)
        assert isinstance(pending, LazyTensor)
        assert (pending.shape, pending.stride(), pending.dtype) == (x.shape, x.stride(), x.dtype)
        torch.testing.assert_close(read(pending).reshape(x.shape), expected, atol=1e-5, rtol=1e-5)
    pending = model.norm(x)
    torch.testing.assert_close(pending + 0, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(functional.silu(pending), functional.silu(expected), atol=1e-5, rtol=1e-5)
    written = functional.silu(model.norm(x), inplace=True)
    torch.testing.assert_close(written + 0, functional.silu(expected), atol=1e-5, rtol=1e-5)


def test_an_input_that_was_written_to_is_not_read() -> None:
    model, (x, _) = Block().eval(), parts()
    accelerate_for_cpu(model)
    pending = model.norm(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="was written to before its output was read"):
        functional.silu(pending)


def test_bfloat16_and_inference_mode() -> None:
    model, (x, embedding) = Block().eval().bfloat16(), (t.bfloat16() for t in parts())
    expected = model(x, embedding).detach()
    accelerate_for_cpu(model)
    with torch.inference_mode():
        output = model(x, embedding)
    assert output.dtype is torch.bfloat16
    torch.testing.assert_close(output, expected, atol=0.03, rtol=0.03)


def test_what_cannot_be_replaced_is_left() -> None:
    model = Block().eval()
    model.norm.register_forward_hook(lambda module, args, output: output * 2)
    x, embedding = parts()
    expected = model(x, embedding).detach()
    accelerate_for_cpu(model)
    assert not explain(model).replaced
    torch.testing.assert_close(model(x, embedding), expected)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_working(duplicate: object) -> None:
    model = Block().eval()
    accelerate_for_cpu(model)
    inputs = parts()
    torch.testing.assert_close(duplicate(model)(*inputs), model(*inputs), rtol=0, atol=0)  # type: ignore[operator]


def test_a_compiled_model_has_no_pending_tensors() -> None:
    model, inputs = Block().eval(), parts()
    accelerate_for_cpu(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), model(*inputs), atol=1e-5, rtol=1e-5)


def test_what_does_not_fit_is_refused_where_it_is_given() -> None:
    """Code that tries a block with other inputs, such as the encoder matcher, gets an error at once."""
    model = nn.Sequential(nn.GroupNorm(4, 32), nn.SiLU()).eval()
    accelerate_for_cpu(model)
    with pytest.raises((ValueError, RuntimeError)):
        model[0](torch.randn(2, 3, 32))
