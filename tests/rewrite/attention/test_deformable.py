"""Deformable attention as a module, as a function with a global name, and as a function in an attribute."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.d_fine.modeling_d_fine import DFineMultiscaleDeformableAttention
from transformers.models.deformable_detr.modeling_deformable_detr import MultiScaleDeformableAttention
from transformers.models.mask2former import modeling_mask2former
from transformers.models.rt_detr_v2.modeling_rt_detr_v2 import RTDetrV2MultiscaleDeformableAttention

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.attention.deformable import (
    STRUCTURE,
    AroundDeformableAttention,
    FusedDeformableAttention,
)

SHAPES = [(6, 4), (3, 2)]
HEADS, WIDTH, QUERIES, POINTS = 4, 64, 5, 2
Mask2FormerAttention = modeling_mask2former.Mask2FormerPixelDecoderEncoderMultiscaleDeformableAttention


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes of values that the op has answered."""
    from hf_cpu_accel.rewrite.attention import deformable

    made, op = [], deformable.deformable_attention

    def noted(value: Tensor, *args: Any) -> Tensor:
        output = op(value, *args)
        made.append(value.dtype)
        return output

    monkeypatch.setattr(deformable, "deformable_attention", noted)
    return made


class Host(nn.Module):
    """Something to accelerate, around a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.linear, self.attention = nn.Linear(WIDTH, WIDTH), module

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def sampled(batch: int = 2) -> dict[str, Any]:
    """Arguments of the module that does nothing else."""
    pixels = sum(height * width for height, width in SHAPES)
    return {
        "value": torch.randn(batch, pixels, HEADS, WIDTH // HEADS),
        "value_spatial_shapes": torch.tensor(SHAPES),
        "value_spatial_shapes_list": SHAPES,
        "level_start_index": torch.tensor([0, 24]),
        "sampling_locations": torch.rand(batch, QUERIES, HEADS, len(SHAPES), POINTS, 2) * 1.4 - 0.2,
        "attention_weights": torch.rand(batch, QUERIES, HEADS, len(SHAPES), POINTS),
        "im2col_step": 64,
    }


@torch.no_grad()
def test_a_module_that_is_nothing_else(calls: list[torch.dtype]) -> None:
    own = MultiScaleDeformableAttention()
    model = accelerate_for_cpu(Host(copy.deepcopy(own)).eval(), dtype="float32")
    fused, given = model.attention, sampled()
    assert isinstance(fused, FusedDeformableAttention)
    assert isinstance(fused, MultiScaleDeformableAttention)
    assert [item.op for item in explain(model).items if item.structure == STRUCTURE] == [
        "deformable_attention"
    ]
    calls.clear()
    torch.testing.assert_close(fused(**given), own(**given), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fused(*given.values()), own(**given), atol=1e-5, rtol=1e-5)
    names = ("value", "sampling_locations", "attention_weights")
    assert fused(**given | {name: given[name].bfloat16() for name in names}).dtype is torch.bfloat16
    assert calls == [torch.float32, torch.float32, torch.bfloat16]
    double = {
        name: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t
        for name, t in given.items()
    }
    assert torch.equal(fused(**double), own(**double))
    with pytest.raises(RuntimeError):
        fused(**{**given, "value_spatial_shapes_list": [(6, 4), (3, 3)]})
    assert len(calls) == 3
    mixed = given | {"attention_weights": given["attention_weights"].double()}
    assert fused(**mixed).dtype is torch.float64
    for wrong in ({**given, "more": 1}, dict(list(given.items())[:-1])):
        with pytest.raises(TypeError):
            fused(**wrong)
    with pytest.raises(TypeError):
        fused(*given.values(), 1)
    assert len(calls) == 3
    restore(model)
    assert type(model.attention) is MultiScaleDeformableAttention


def mask2former() -> tuple[nn.Module, dict[str, Any]]:
    module = Mask2FormerAttention(WIDTH, HEADS, len(SHAPES), POINTS)
    given = _given(sum(height * width for height, width in SHAPES), 2)
    del given["spatial_shapes"]
    return module, given


def rt_detr_v2() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.RTDetrV2Config(
        d_model=WIDTH, decoder_attention_heads=HEADS, decoder_n_levels=2, decoder_n_points=POINTS
    )
    return RTDetrV2MultiscaleDeformableAttention(config), _given(QUERIES, 4)


def d_fine() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.DFineConfig(
        d_model=WIDTH, decoder_attention_heads=HEADS, num_feature_levels=2, decoder_n_points=[3, 1]
    )
    return DFineMultiscaleDeformableAttention(config), _given(QUERIES, 4)


def _given(queries: int, numbers: int) -> dict[str, Any]:
    levels = 1 if numbers == 4 else len(SHAPES)
    return {
        "hidden_states": torch.randn(2, queries, WIDTH),
        "encoder_hidden_states": torch.randn(2, 30, WIDTH),
        "reference_points": torch.rand(2, queries, levels, numbers),
        "spatial_shapes": torch.tensor(SHAPES),
        "spatial_shapes_list": SHAPES,
    }


@pytest.mark.parametrize("make", [mask2former, rt_detr_v2, d_fine])
@torch.no_grad()
def test_a_function_that_a_module_calls(make: Any, calls: list[torch.dtype]) -> None:
    torch.manual_seed(0)
    own, given = make()
    for parameter in own.parameters():
        nn.init.normal_(parameter, std=0.3)
    own.eval()
    before = dict(vars(modeling_mask2former))
    model = accelerate_for_cpu(Host(copy.deepcopy(own)).eval(), dtype="float32")
    fused = model.attention
    assert isinstance(fused, AroundDeformableAttention)
    assert isinstance(fused, type(own))
    calls.clear()
    for module in (fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        for ours, theirs in zip(module(**given), own(**given), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert calls == [torch.float32] * 3
    assert vars(modeling_mask2former) == before  # the host's module is as it was
    restore(model)
    assert type(model.attention) is type(own)
    assert vars(model.attention).keys() == vars(own).keys()
    assert torch.equal(model.attention(**given)[0], own(**given)[0])
    assert len(calls) == 3


@torch.no_grad()
def test_what_the_host_calls_by_that_name_later(
    monkeypatch: pytest.MonkeyPatch, calls: list[torch.dtype]
) -> None:
    """And by others: they are read when they are called."""
    own, given = mask2former()
    fused = accelerate_for_cpu(Host(copy.deepcopy(own)).eval(), dtype="float32").attention
    fused(**given)
    monkeypatch.setattr(modeling_mask2former, "nn", Softer)
    torch.testing.assert_close(fused(**given)[0], own(**given)[0], atol=1e-5, rtol=1e-5)
    assert len(calls) > 0
    calls.clear()
    monkeypatch.setattr(
        modeling_mask2former, "multi_scale_deformable_attention", lambda value, *args: value.flatten(2)
    )
    assert torch.equal(fused(**given)[0], fused._original_class.forward(fused, **given)[0])
    assert calls == []


class Softer:
    """torch.nn with another softmax."""

    class functional:
        grid_sample = nn.functional.grid_sample

        @staticmethod
        def softmax(x: Tensor, dim: int) -> Tensor:
            return nn.functional.softmax(x / 2, dim)


def test_functions_of_modules_are_not_kept() -> None:
    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.call = lambda x: self.linear(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.call(x)

    model = Host(Caller()).eval()
    known = weakref.ref(model.attention)
    restore(accelerate_for_cpu(model, dtype="float32"))
    del model
    gc.collect()
    assert known() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_says_nothing(dtype: torch.dtype) -> None:
    host = Host(MultiScaleDeformableAttention()).eval()
    torch.set_default_dtype(dtype)
    try:
        model = accelerate_for_cpu(host, dtype="float32")
    finally:
        torch.set_default_dtype(torch.float32)
    assert isinstance(model.attention, FusedDeformableAttention)


class Nearest(nn.Module):
    """The same arguments, another function."""

    def forward(
        self,
        value: Tensor,
        value_spatial_shapes_list: Any,
        sampling_locations: Tensor,
        attention_weights: Tensor,
    ) -> Tensor:
        return value.mean(1, keepdim=True).flatten(2).expand(-1, sampling_locations.shape[1], -1)


def test_others_are_left() -> None:
    model = accelerate_for_cpu(Host(Nearest()).eval(), dtype="float32")
    assert type(model.attention) is Nearest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@torch.no_grad()
def test_a_detector(dtype: str, calls: list[torch.dtype]) -> None:
    torch.manual_seed(0)
    backbone = transformers.ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 32, 32],
        depths=[1, 1, 1, 1],
        out_features=["stage2", "stage3", "stage4"],
    )
    sizes = {
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
    }
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 10}
    config = transformers.DeformableDetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        **sizes,
    )
    own = transformers.DeformableDetrModel(config).eval()
    images = torch.randn(2, 3, 64, 96)
    expected = own(images).encoder_last_hidden_state
    model = accelerate_for_cpu(own, dtype=dtype)
    assert explain(model).counts()[STRUCTURE] == 4
    calls.clear()
    got = model(images).encoder_last_hidden_state
    assert len(calls) >= 4  # layers that are being recorded run more than once
    bound = {"float32": 1e-4, "bfloat16": 2e-2, "int8": 0.1}[dtype]
    assert (got - expected).norm() <= bound * expected.norm()
