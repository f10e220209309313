"""Layers with disentangled attention: their arguments, calls of the own forward, and changes between calls."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.encoder import layer as encoder_layer
from tests.rewrite.encoder_families import deberta_v2, fused_layers

LENGTHS = (1, 3, 16, 33, 131)


def batch_of(length: int, *, padded: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    mask = torch.ones(3, length, dtype=torch.long)
    if padded and length > 2:
        mask[0, : length // 2] = mask[1, -1:] = mask[2, 1] = 0  # the third has a hole
    return {
        "input_ids": torch.randint(3, 99, (3, length), generator=generator),
        "attention_mask": mask,
    }


def run(model: nn.Module, batch: dict[str, Tensor], **more: object) -> Tensor:
    with torch.no_grad():
        return model(**batch, **more)[0]


def tokens_of(hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
    mask = batch["attention_mask"]
    return hidden * (mask if mask.dim() == 2 else mask.diagonal(dim1=1, dim2=2))[..., None]


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    served: list[int] = []
    op = encoder_layer.bound_encoder_layer
    with monkeypatch.context() as patched:
        patched.setattr(encoder_layer, "bound_encoder_layer", lambda *inputs: served.append(1) or op(*inputs))
        yield served


@pytest.mark.parametrize("padding", ["skip", "compute"])
@pytest.mark.parametrize("threads", [1, 2])
def test_all_lengths_give_the_same(threads: int, padding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = deberta_v2()
    batches = [batch_of(length, padded=padded) for length in LENGTHS for padded in (False, True)]
    expected = [run(model, batch) for batch in batches]
    accelerate_for_cpu(model, dtype="float32", padding=padding)
    assert len(fused_layers(model)) == 2
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with counted(monkeypatch) as served:
            given = [run(model, batch) for batch in batches]
    finally:
        torch.set_num_threads(before)
    assert len(served) == 2 * len(batches)
    for ours, theirs, batch in zip(given, expected, batches, strict=True):
        if padding == "skip":
            ours, theirs = tokens_of(ours, batch), tokens_of(theirs, batch)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 0.03), ("int8", 0.06), ("int4", 0.3)])
def test_reduced_precision_stays_close(dtype: str, error: float) -> None:
    model = deberta_v2()
    batches = [batch_of(length) for length in LENGTHS]
    expected = [tokens_of(run(model, batch), batch) for batch in batches]
    accelerate_for_cpu(model, dtype=dtype)
    assert len(fused_layers(model)) == 2
    for batch, before in zip(batches, expected, strict=True):
        assert (tokens_of(run(model, batch), batch) - before).norm() <= error * before.norm()


def test_a_model_in_bfloat16() -> None:
    model = deberta_v2().bfloat16()
    batch = batch_of(33)
    expected = tokens_of(run(model, batch), batch).float()
    accelerate_for_cpu(model)
    assert len(fused_layers(model)) == 2
    assert (tokens_of(run(model, batch), batch).float() - expected).norm() <= 0.03 * expected.norm()


@pytest.mark.parametrize("kind", ["pairs", "float", "bool", "inference mode"])
def test_masks_of_all_kinds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = deberta_v2(), batch_of(9)
    if kind == "pairs":  # a text of two parts of which the first does not see the second
        batch["attention_mask"] = torch.ones(3, 9, 9, dtype=torch.long)
        batch["attention_mask"][:, :4, 4:] = 0
    elif kind in ("float", "bool"):
        batch["attention_mask"] = batch["attention_mask"].to(torch.float if kind == "float" else torch.bool)
    layers = model.encoder.layer if kind != "bool" else nn.ModuleList()
    call = {"hidden_states": torch.randn(3, 9, 64), "attention_mask": batch["attention_mask"]}
    encode = model.encoder if kind in ("pairs", "bool") else None  # embeddings and poolers take other masks

    def hidden() -> Tensor:
        with torch.inference_mode(kind == "inference mode"), torch.no_grad():
            output = model(**batch)[0] if encode is None else encode(**call)[0]
        return output if kind == "pairs" else tokens_of(output, batch)

    expected = hidden()
    accelerate_for_cpu(model, dtype="float32")
    assert len(layers) in (0, 2)
    with counted(monkeypatch) as served:
        for _ in range(2):
            torch.testing.assert_close(hidden(), expected, rtol=1e-4, atol=2e-5)
    assert len(served) == 4


def test_what_the_op_does_not_do_goes_the_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = deberta_v2(), batch_of(9, padded=False)
    expected = model(**batch, output_attentions=True)
    hidden = torch.randn(3, 9, 64)
    ours = {"attention_mask": torch.ones(3, 1, 9, 9), "rel_embeddings": model.encoder.get_rel_embedding()}
    relative = torch.arange(9)[:, None] - torch.arange(9)
    uneven = relative.clone()
    uneven[3, 4] = 2
    calls = [
        {**ours, "relative_pos": uneven[None]},  # not of distances alone
        {**ours, "relative_pos": relative[None].abs()},  # the same before and after
        {**ours, "relative_pos": None},
        {**ours, "relative_pos": relative[None], "query_states": torch.randn(3, 9, 64)},
    ]
    layer = model.encoder.layer[1]
    with torch.no_grad():
        states = [layer(hidden, **call)[0] for call in calls]
        accelerate_for_cpu(model, dtype="float32")
        with counted(monkeypatch) as served:
            given = model(**batch, output_attentions=True)
            for call, before in zip(calls, states, strict=True):
                torch.testing.assert_close(
                    model.encoder.layer[1](hidden, **call)[0], before, rtol=1e-4, atol=2e-5
                )
    assert not served
    for one, other in zip(given.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_vectors_and_weights_may_change() -> None:
    model, batch = deberta_v2(), batch_of(16)
    twin = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    run(model, batch)

    def both(change: str) -> None:
        with torch.no_grad():
            for one in (model, twin):
                {
                    "vectors": lambda encoder: encoder.rel_embeddings.weight.mul_(1.5),
                    "past counting": lambda encoder: encoder.rel_embeddings.weight.data.add_(0.3),
                    "norm": lambda encoder: encoder.LayerNorm.weight.add_(0.5),
                    "bias": lambda encoder: encoder.layer[0].attention.self.key_proj.bias.add_(0.5),
                }[change](one.encoder)
        expected = tokens_of(run(twin, batch), batch)
        for _ in range(2):
            torch.testing.assert_close(
                tokens_of(run(model, batch), batch), expected, rtol=1e-4, atol=2e-5, msg=change
            )

    for change in ("vectors", "past counting", "norm", "bias"):
        both(change)


def test_two_models_take_turns() -> None:
    models = [deberta_v2(), deberta_v2(position_buckets=6)]
    models[1].encoder.rel_embeddings.weight.data.mul_(2)
    batch = batch_of(16)
    expected = [tokens_of(run(model, batch), batch) for model in models]
    for model in models:
        accelerate_for_cpu(model, dtype="float32")
    for _ in range(2):
        for model, before in zip(models, expected, strict=True):
            torch.testing.assert_close(tokens_of(run(model, batch), batch), before, rtol=1e-4, atol=2e-5)


def test_copies_and_pickles() -> None:
    model, batch = deberta_v2(), batch_of(16)
    accelerate_for_cpu(model, dtype="float32")
    expected = run(model, batch)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(again, batch), expected)
    other = deberta_v2()
    restore(model)
    assert torch.equal(run(model, batch), run(other, batch))


@pytest.mark.usefixtures("nothing_is_recorded")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"relative_attention": False}, "disentangled attention"),
        ({"pos_att_type": []}, "disentangled attention"),
    ],
)
def test_what_is_not_fused_says_why(changes: dict[str, object], reason: str) -> None:
    model = deberta_v2(**changes)
    accelerate_for_cpu(model, dtype="float32")
    assert not fused_layers(model)
    assert sum(reason in str(item.reason) for item in explain(model).items) == 2
