"""Embeddings as one op: the matched modules, equal values, and calls of the own forward."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.encoder.embeddings import STRUCTURE, FusedEmbeddings
from tests.rewrite.encoder.embedding_cases import (
    FAMILIES,
    POSITIONS,
    VOCABULARY,
    build,
    counted,
    every_family,
    outputs,
)


@every_family
def test_the_op_serves_and_gives_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    original = model.embeddings
    before, keys = outputs(original), list(model.state_dict())
    accelerate_for_cpu(model, dtype="int8")
    fused = model.embeddings
    assert isinstance(fused, FusedEmbeddings)
    assert isinstance(fused, type(original))
    assert (fused._reading.first_position, fused._reading.padding_id) == FAMILIES[name][3]
    assert [
        (item.name, item.op, item.reason) for item in explain(model).items if item.structure == STRUCTURE
    ] == [("embeddings", "embedding_norm", None)]
    assert list(model.state_dict()) == keys
    with counted(monkeypatch) as served:
        after = outputs(fused)
    assert len(served) == len(before)
    for ours, theirs in zip(after, before, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert ((ours - theirs).norm(dim=-1) <= 1e-6 * theirs.norm(dim=-1)).all()
    restore(model)
    assert model.embeddings is original
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(outputs(original), before, strict=True))


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_bfloat16_is_no_farther_from_the_truth_than_torch(name: str) -> None:
    model = build(name, torch.bfloat16)
    theirs, truth = outputs(model.embeddings), outputs(copy.deepcopy(model.embeddings).double())
    accelerate_for_cpu(model, dtype="bfloat16")
    ours = outputs(model.embeddings)
    assert all(output.dtype is torch.bfloat16 for output in ours)
    error = [sum(float((a - b).norm()) for a, b in zip(some, truth, strict=True)) for some in (ours, theirs)]
    assert error[0] <= error[1]


@every_family
def test_the_longest_sequence_and_one_too_long(name: str) -> None:
    model = build(name)
    first, _ = FAMILIES[name][3]
    has_positions = hasattr(model.embeddings, "position_embeddings")
    ids = torch.randint(4, VOCABULARY, (2, POSITIONS - first + 1))
    with torch.no_grad():
        expected = model.embeddings(ids[:, 1:])
        accelerate_for_cpu(model, dtype="float32")
        torch.testing.assert_close(model.embeddings(ids[:, 1:]), expected)
        if has_positions:
            with pytest.raises((IndexError, RuntimeError)) as ours:
                model.embeddings(ids)
            restore(model)
            with pytest.raises((IndexError, RuntimeError)) as theirs:
                model.embeddings(ids)
            assert (ours.type, str(ours.value)) == (theirs.type, str(theirs.value))


def test_errors_are_those_of_the_module() -> None:
    model, ids = build(), torch.randint(4, VOCABULARY, (2, 7))
    wrong = [
        {"input_ids": ids + VOCABULARY},
        {"input_ids": ids - VOCABULARY},
        {"input_ids": ids, "token_type_ids": ids},
        {"input_ids": ids, "position_ids": ids[:, :3]},
        {"input_ids": ids.float()},
        {"input_ids": ids[0]},
        {"input_ids": ids, "nonsense": 1},
        {},
    ]

    def errors() -> list[tuple[type, str]]:
        raised = []
        for call in wrong:
            with pytest.raises(Exception) as info:  # noqa: PT011 (which one is the question)
                model.embeddings(**call)
            raised.append((info.type, str(info.value)))
        return raised

    before = errors()
    accelerate_for_cpu(model, dtype="float32")
    assert [kind for kind, _ in before[:3]] == [IndexError] * 3
    assert errors() == before


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_what_the_op_does_not_serve_takes_the_modules_own_forward(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(name)
    ids = torch.randint(4, VOCABULARY, (2, 7))
    more: list[dict[str, object]] = [{"input_ids": None, "inputs_embeds": torch.randn(2, 7, 64)}]
    if name != "distilbert":
        takes = inspect.signature(model.embeddings.forward).parameters
        length = next(name for name in ("cache_length", "past_key_values_length") if name in takes)
        more.append({"input_ids": ids, length: 3})
    with torch.no_grad():
        expected = [model.embeddings(**call) for call in more]
        accelerate_for_cpu(model, dtype="float32")
        with counted(monkeypatch) as served:
            got = [model.embeddings(**call) for call in more]
            assert not served
            model.embeddings(ids, None)
            assert len(served) == 1
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


def test_gradients_dropout_and_training(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build(), torch.randint(4, VOCABULARY, (2, 7))
    accelerate_for_cpu(model, dtype="float32")
    embeddings = model.embeddings
    with counted(monkeypatch) as served:
        embeddings(ids)  # with gradients on, but none asked for
        assert len(served) == 1
        embeddings.word_embeddings.weight.requires_grad_(True)
        embeddings(ids).sum().backward()
        assert embeddings.word_embeddings.weight.grad is not None
        with torch.no_grad():
            assert len(served) == 1
            embeddings(ids)
            assert len(served) == 2
            embeddings.dropout.train()  # dropout at inference, for several samples
            assert (embeddings(ids) == 0).any()
            assert len(served) == 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_inside_are_called(when: str) -> None:
    model, ids, seen = build(), torch.randint(4, VOCABULARY, (2, 7)), []

    def install() -> None:
        model.get_input_embeddings().register_forward_hook(lambda *args: seen.append(args[-1].shape))

    if when == "before":
        install()
    accelerate_for_cpu(model, dtype="float32")
    if when == "after":
        install()
    model(ids)
    assert seen == [(2, 7, 64)]


def test_hooks_of_the_module_itself_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, seen = build(), torch.randint(4, VOCABULARY, (2, 7)), []
    model.embeddings.register_forward_hook(lambda *args: seen.append("before"))
    accelerate_for_cpu(model, dtype="float32")
    model.embeddings.register_forward_hook(lambda *args: seen.append("after"))
    with counted(monkeypatch) as served:
        model(ids)
    assert len(served) == 1
    assert seen == ["before", "after"]


@pytest.mark.parametrize("pattern", ["embeddings", "embeddings.LayerNorm"])
def test_skip_modules_is_heeded(pattern: str) -> None:
    model = accelerate_for_cpu(build(), dtype="float32", skip_modules=(pattern,))
    assert not isinstance(model.embeddings, FusedEmbeddings)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_traces_in_one_graph(name: str) -> None:
    model = accelerate_for_cpu(build(name), dtype="float32")
    compiled = torch.compile(model.embeddings, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for length in (5, 9):
            ids = torch.randint(4, VOCABULARY, (2, length))
            torch.testing.assert_close(compiled(input_ids=ids), model.embeddings(ids))
