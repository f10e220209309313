"""Services around small models, without a socket."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from hf_cpu_accel.serve.encoders.encoder import Encoder
from hf_cpu_accel.serve.encoders.loading import load_classifier, load_embedder
from hf_cpu_accel.serve.http.app import Service
from hf_cpu_accel.serve.http.metrics import Metrics
from hf_cpu_accel.serve.language.model import LanguageModel
from hf_cpu_accel.serve.models import Models, Served
from hf_cpu_accel.serve.speech.transcriber import Transcriber
from tests.serve import sounds, tiny

LABELS = ["NEGATIVE", "NEUTRAL", "POSITIVE"]


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An embedder, a classifier with three labels, and one with a single label, all in float32."""
    folder = tmp_path_factory.mktemp("models")
    options = {"dtype": "float32", "threads": 1}
    classifier, ranker = (
        load_classifier(name, str(tiny.save_classifier(folder / name, labels)), **options)
        for name, labels in (("classifier", LABELS), ("ranker", ["LABEL_0"]))
    )
    embedder = load_embedder("embedder", str(tiny.save_embedder(folder / "embedder")), **options)
    return {"embedder": embedder, "classifier": classifier, "ranker": ranker, "folder": folder}


@pytest.fixture
def encoders(loaded: dict[str, Any]) -> Iterator[Callable[..., list[Served]]]:
    """Makes encoders in service, with options of their batchers."""
    made: list[Served] = []

    def make(*names: str, **batching: Any) -> list[Served]:
        made.extend(Encoder(loaded[name], **batching) for name in names)
        return made

    yield make
    for encoder in made:
        assert encoder.close(30)


@pytest.fixture
def client(encoders: Callable[..., list[Served]], loaded: dict[str, Any]) -> Iterator[TestClient]:
    """A client of a service with all three."""
    metrics = Metrics()
    names = ("embedder", "classifier", "ranker")
    served = [encoder for name in names for encoder in encoders(name, on_batch=metrics.on_batch(name))[-1:]]
    with TestClient(Service(Models(served), metrics).app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def full_service(
    loaded: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Service]]:
    """Builds services around one model of each kind; the embedder has a prompt."""
    embedder = dataclasses.replace(loaded["embedder"], prompts={"query": "time "})
    models = Models(
        [
            LanguageModel("writer", tiny.writer(), tiny.byte_tokenizer(), rows=2, waiting=4),
            Encoder(embedder),
            Encoder(loaded["ranker"]),
            Transcriber("ears", sounds.recognizer(tmp_path_factory.mktemp("speech"))),
        ]
    )
    yield lambda **options: Service(models, **options)
    for model in models:
        assert model.close(30)
