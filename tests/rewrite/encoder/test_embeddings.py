"""Embeddings as one op: which modules, the same numbers, and what takes the module's own forward."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.encoder import embeddings as rule
from hf_cpu_accel.rewrite.encoder.embeddings import STRUCTURE, FusedEmbeddings

VOCABULARY, POSITIONS, PADDING = 120, 40, 1
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": POSITIONS,
}
NARROW = {**SIZES, "embedding_size": 32}
PADDED = {**SIZES, "pad_token_id": PADDING}
DISTIL = {"vocab_size": VOCABULARY, "dim": 64, "n_layers": 1, "n_heads": 4, "hidden_dim": 96}

# Model, its config, and how it counts positions: first one, and the id of padding that is not counted.
FAMILIES = {
    "bert": ("BertModel", "BertConfig", SIZES, (0, None)),
    "bert-with-padding-id": ("BertModel", "BertConfig", {**SIZES, "pad_token_id": 3}, (0, None)),
    "distilbert": ("DistilBertModel", "DistilBertConfig", {**DISTIL, "max_position_embeddings": POSITIONS}, (0, None)),
    "electra": ("ElectraModel", "ElectraConfig", NARROW, (0, None)),
    "albert": ("AlbertModel", "AlbertConfig", NARROW, (0, None)),
    "modernbert": ("ModernBertModel", "ModernBertConfig", {**SIZES, "pad_token_id": 0}, (0, None)),
    "roberta": ("RobertaModel", "RobertaConfig", {**PADDED, "type_vocab_size": 1}, (2, 1)),
    "roberta-padded-with-0": ("RobertaModel", "RobertaConfig", {**SIZES, "pad_token_id": 0}, (1, 0)),
    "xlm-roberta": ("XLMRobertaModel", "XLMRobertaConfig", PADDED, (2, 1)),
    "camembert": ("CamembertModel", "CamembertConfig", PADDED, (2, 1)),
    "mpnet": ("MPNetModel", "MPNetConfig", PADDED, (2, 1)),
}  # fmt: skip
every_family = pytest.mark.parametrize("name", FAMILIES)


def build(name: str = "bert", dtype: torch.dtype = torch.float32) -> nn.Module:
    model_class, config_class, settings, _ = FAMILIES[name]
    model = getattr(tf, model_class)(getattr(tf, config_class)(**settings))
    with torch.no_grad():
        for parameter in model.embeddings.parameters():  # also the rows of padding, which are 0 at first
            parameter.normal_()
    return model.eval().to(dtype)


def calls(embeddings: nn.Module) -> list[dict[str, Tensor]]:
    """The ways in which models call their embeddings."""
    ids = torch.randint(4, VOCABULARY, (3, 11))
    ids[1, 7:], ids[2, :4], ids[2, 6] = PADDING, PADDING, 0
    optional = {
        "token_type_ids": torch.randint(0, 2, (3, 11)),
        "position_ids": torch.randint(0, POSITIONS, (3, 11)),
    }
    if not hasattr(embeddings, "position_embeddings"):
        optional = {}
    elif not hasattr(embeddings, "token_type_embeddings"):
        optional.pop("token_type_ids")
    elif embeddings.token_type_embeddings.num_embeddings == 1:
        optional["token_type_ids"].zero_()
    given = [{"input_ids": ids}, {"input_ids": ids.int()}, {"input_ids": ids[:1, :1]}]
    given += [{"input_ids": ids, name: value} for name, value in optional.items()]
    given += [{"input_ids": ids, name: value[:1]} for name, value in optional.items()]
    return [*given, {"input_ids": ids, **optional}]


def outputs(embeddings: nn.Module) -> list[Tensor]:
    torch.manual_seed(7)
    with torch.no_grad():
        return [embeddings(**call) for call in calls(embeddings)]


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The outputs of the op while this lasts."""
    served: list[Tensor] = []

    def record(*args: object) -> Tensor:
        served.append(look_up(*args))
        return served[-1]

    look_up = rule.look_up
    with monkeypatch.context() as patch:
        patch.setattr(rule, "look_up", record)
        yield served


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
        more.append({"input_ids": ids, "past_key_values_length": 3})
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


def test_tables_may_change_while_accelerated() -> None:
    model, ids = build(), torch.randint(4, VOCABULARY, (2, 7))
    accelerate_for_cpu(model, dtype="float32")
    original = copy.deepcopy(restore(copy.deepcopy(model))).embeddings

    def assert_same() -> None:
        with torch.no_grad():
            torch.testing.assert_close(model.embeddings(ids), original(ids), rtol=1e-6, atol=1e-6)

    with torch.no_grad():
        for embeddings in (model.embeddings, original):
            embeddings.word_embeddings.weight.mul_(2)
            embeddings.LayerNorm.bias.add_(1)
    assert_same()
    model.resize_token_embeddings(VOCABULARY + 8)
    ids[0, 0] = VOCABULARY + 7
    original.word_embeddings = copy.deepcopy(model.get_input_embeddings())
    assert_same()

    class Doubled(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    for embeddings in (model.embeddings, original):
        torch.manual_seed(1)
        embeddings.word_embeddings = Doubled(VOCABULARY + 8, 64)
    assert_same()
    restore(model)
    assert isinstance(model.get_input_embeddings(), Doubled)


def test_parametrized_tables_are_computed() -> None:
    class Negated(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return -weight

    for when in ("before", "after"):
        model, ids = build(), torch.randint(4, VOCABULARY, (2, 7))
        if when == "before":
            parametrize.register_parametrization(model.embeddings.word_embeddings, "weight", Negated())
        model.eval()
        accelerate_for_cpu(model, dtype="float32")
        if when == "after":
            parametrize.register_parametrization(model.embeddings.word_embeddings, "weight", Negated())
        with torch.no_grad():
            got = model.embeddings(ids)
            restore(model)
            torch.testing.assert_close(got, model.embeddings(ids))


def test_copies_and_pickles_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build("roberta"), torch.randint(4, VOCABULARY, (2, 7))
    with torch.no_grad():
        before = model.embeddings(ids)
        accelerate_for_cpu(model, dtype="float32", originals="memory")
        accelerated = model.embeddings(ids)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with counted(monkeypatch) as served:
                assert torch.equal(twin.embeddings(ids), accelerated)
                twin.embeddings.word_embeddings.weight.zero_()
                assert not torch.equal(twin.embeddings(ids), accelerated)
            assert len(served) == 2
            assert torch.equal(model.embeddings(ids), accelerated)
        restore(model)
        assert torch.equal(model.embeddings(ids), before)


def test_a_tied_table_stays_tied() -> None:
    config = tf.BertConfig(**SIZES)
    model, ids = tf.BertForMaskedLM(config).eval(), torch.randint(4, VOCABULARY, (2, 7))
    with torch.no_grad():
        before = model(ids).logits
        accelerate_for_cpu(model, dtype="float32")
        assert isinstance(model.bert.embeddings, FusedEmbeddings)
        torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-4)
        restore(model)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert torch.equal(model(ids).logits, before)


def test_a_table_without_rows_is_no_reason_to_fail() -> None:
    model = tf.BertModel(tf.BertConfig(**SIZES, type_vocab_size=0)).eval()
    assert not isinstance(accelerate_for_cpu(model, dtype="float32").embeddings, FusedEmbeddings)


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
