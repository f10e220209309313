"""Embeddings of each family, and the forms of their calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from hf_cpu_accel.rewrite.encoder import embeddings as rule

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
