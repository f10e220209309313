"""What of integrations/ray needs no Ray: a replica's server, the settings of a deployment, and the columns of a table."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from starlette.testclient import TestClient

from hf_cpu_accel import accelerate_for_cpu
from tests.ray.modules import FOLDER, module_of
from tests.serve import tiny

replica, embedding = module_of("replica"), module_of("embedding")


def test_a_replica_serves_a_packed_folder(tmp_path: Path) -> None:
    accelerate_for_cpu(tiny.writer(), dtype="int8").save_pretrained(tmp_path, packed=True)
    tiny.byte_tokenizer().save_pretrained(tmp_path)
    service = replica.service(replica.Arguments(models=[f"chat={tmp_path}"]))
    with TestClient(service.app) as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["chat"]
        answer = client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 4})
        assert answer.json()["usage"]["completion_tokens"] == 4
    for served in service.models:
        served.close(5)


def test_the_settings_of_a_deployment() -> None:
    options = replica.Arguments(models=["m"], cpus=4, max_replicas=8, target_requests=6).options
    assert options["ray_actor_options"] == {"num_cpus": 4}
    assert options["autoscaling_config"] == {
        "min_replicas": 1,
        "max_replicas": 8,
        "target_ongoing_requests": 6,
    }
    assert options["max_ongoing_requests"] == 12


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"models": []}, "models"),
        ({"models": ["m"], "min_replicas": 3}, "min_replicas=3 is more than max_replicas=2"),
        ({"models": ["m"], "cpus": 0}, "cpus"),
        ({"models": ["m"], "replicas": 2}, "replicas"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        replica.Arguments(**given)


def test_the_example_configuration_is_one() -> None:
    (application,) = yaml.safe_load((FOLDER / "serve.yaml").read_text(encoding="utf-8"))["applications"]
    module, function = application["import_path"].split(":")
    assert f"def {function}(" in (FOLDER / f"{module}.py").read_text(encoding="utf-8")
    replica.Arguments(**application["args"])


COLUMNS = {"id": "int64", "body": "large_string"}


def test_columns_that_will_do() -> None:
    embedding.check_columns(COLUMNS, "body", "embedding", "id")


@pytest.mark.parametrize(
    ("texts", "output", "unique", "problem"),
    [
        ("text", "embedding", None, "texts='text' is not a column of the table; it has the columns id, body"),
        (
            "body",
            "embedding",
            "key",
            "unique='key' is not a column of the table; it has the columns id, body",
        ),
        ("id", "embedding", None, "texts='id' is a column of type int64; accepted types are string"),
        ("body", "id", None, "output='id' is already a column of the table"),
    ],
)
def test_columns_that_will_not(texts: str, output: str, unique: str | None, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        embedding.check_columns(COLUMNS, texts, output, unique)
