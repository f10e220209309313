"""Modules that are embeddings, and modules that only look like them, by structure and computation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.rewrite.encoder.embeddings import FusedEmbeddings


class _Plain(nn.Module):
    """Words and positions, to be varied."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 16), nn.Embedding(20, 16)
        self.norm = nn.LayerNorm(16)

    def look_up(self, ids: Tensor) -> Tensor:
        return self.words(ids) + self.places(torch.arange(ids.shape[1]))

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        summed = (
            self.look_up(input_ids)
            if position_ids is None
            else self.words(input_ids) + self.places(position_ids)
        )
        return self.norm(summed)


class _Scaled(_Plain):
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return 1.001 * super().forward(input_ids, position_ids)


class _Backwards(_Plain):
    def look_up(self, ids: Tensor) -> Tensor:
        return self.words(ids) + self.places(torch.arange(ids.shape[1]).flip(0))


class _Twice(_Plain):
    def look_up(self, ids: Tensor) -> Tensor:
        return super().look_up(ids) + self.words(ids)


class _WrapsAround(_Plain):
    """Only long sequences show what this does."""

    def look_up(self, ids: Tensor) -> Tensor:
        return self.words(ids) + self.places(torch.arange(ids.shape[1]) % 12)


class _Masked(_Plain):
    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:  # type: ignore[override]
        output = super().forward(input_ids, position_ids)
        return output if mask is None else output * mask


class _PositionsIgnored(_Plain):
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return super().forward(input_ids)


class _Projected(_Plain):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)


class _Bare(_Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()


class _Clipped(_Plain):
    def __init__(self) -> None:
        super().__init__()
        self.words.max_norm = 1.0


@pytest.mark.parametrize(
    "kind",
    [_Scaled, _Backwards, _Twice, _WrapsAround, _Masked, _PositionsIgnored, _Projected, _Bare, _Clipped],
)
def test_other_things_are_left(kind: type[_Plain]) -> None:
    model = nn.ModuleDict({"embeddings": kind()}).eval()
    ids = torch.randint(0, 50, (2, 16))
    with torch.no_grad():
        before = model["embeddings"](ids)
        accelerate_for_cpu(model, dtype="float32")
        assert not isinstance(model["embeddings"], FusedEmbeddings)
        torch.testing.assert_close(model["embeddings"](ids), before, rtol=1e-6, atol=1e-6)


def test_any_module_of_that_structure_is_taken() -> None:
    model = nn.ModuleDict({"embeddings": _Plain()}).eval()
    ids = torch.randint(0, 50, (2, 16))
    before = model["embeddings"](ids)
    accelerate_for_cpu(model, dtype="float32")
    assert isinstance(model["embeddings"], FusedEmbeddings)
    torch.testing.assert_close(model["embeddings"](ids), before.detach(), rtol=1e-6, atol=1e-6)
