"""Test a server under load: random lengths, clients that disconnect, every response checked, and its memory.

    python -m benchmarks.serving.load [--minutes 30] [--clients 8] [--requests 100000]

`hf-cpu-accel serve` as a process, on 127.0.0.1 alone, with the small random models of the tests in float32: a language model
and an embedder, whose answers are known beforehand from the models themselves. Each client sends one request after another: a
completion, whole or streamed, or texts to embed. A third of the streams is left in the middle. The exit code is 1 if an answer
was wrong, a request failed, or memory at the end was more than 2 % above that of the second fifth.
"""

from __future__ import annotations

import dataclasses
import http.client
import itertools
import json
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer

from benchmarks.serving.process import command, server
from benchmarks.soak.memory import MOST_GROWTH, growth
from tests.serve import tiny

TEXTS, LONGEST = 24, 48
_LEFT = 1 / 3
_MOST_OFF = 1e-4


@dataclasses.dataclass
class Expected:
    """Outputs of the models without a server: the tokens after each text, and the vector of each sentence."""

    texts: list[str]
    answers: list[str]
    sentences: list[str]
    vectors: list[torch.Tensor]


@dataclasses.dataclass
class Counts:
    """Counts of the clients. memory: (seconds, bytes of the server), at least once."""

    asked: int = 0
    left: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    failed: list[str] = dataclasses.field(default_factory=list)
    memory: list[tuple[float, int]] = dataclasses.field(default_factory=list)

    @property
    def growth(self) -> float:
        """Return the growth of memory from the second fifth to the last. Caches fill in the first."""
        return growth([size for _, size in self.memory], parts=5)


def expected(writer: Any, embedder: Path) -> Expected:
    """Compute the models' outputs, one text after another."""
    from transformers import AutoModel

    chosen, tokenizer = random.Random(0), tiny.byte_tokenizer()
    texts = [
        "".join(chosen.choices("abcdefghijklmnopqrstuvwxyz", k=chosen.randint(1, 200))) for _ in range(TEXTS)
    ]
    answers, vectors = [], []
    bert = AutoModel.from_pretrained(embedder).eval()
    sentences = [" ".join(chosen.choices(tiny.WORDS, k=chosen.randint(1, 20))) for _ in range(TEXTS)]
    with torch.no_grad():
        for text in texts:
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            written = writer.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=LONGEST, do_sample=False
            )
            answers.append(str(tokenizer.decode(written[0, ids.shape[1] :].tolist())))
        for sentence in sentences:
            hidden = bert(**tiny.tokenizer()(sentence, return_tensors="pt")).last_hidden_state[0].mean(dim=0)
            vectors.append(hidden / hidden.norm())
    return Expected(texts, answers, sentences, vectors)


class Client:
    """Sends one request after another, and checks the responses."""

    def __init__(self, port: int, known: Expected, counts: Counts, seed: int) -> None:
        self.port, self.known, self.counts = port, known, counts
        self.chosen = random.Random(seed)

    def ask(self) -> None:
        """Send one request."""
        kinds = (self._embed, self._complete, self._stream)
        try:
            wrong = self.chosen.choice(kinds)()
        except Exception as error:
            self.counts.failed.append(f"{type(error).__name__}: {error}")
        else:
            if wrong is not None:
                self.counts.wrong.append(wrong)
        self.counts.asked += 1

    @contextmanager
    def _post(self, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)) as connection:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            with connection.getresponse() as answer:
                if answer.status != 200:
                    raise ValueError(f"{path}: {answer.status} {answer.read().decode()[:200]}")
                yield answer

    def _embed(self) -> str | None:
        numbers = self.chosen.choices(range(TEXTS), k=self.chosen.randint(1, 8))
        with self._post("/embed", {"inputs": [self.known.sentences[number] for number in numbers]}) as answer:
            vectors = torch.tensor(json.loads(answer.read()))
        truth = torch.stack([self.known.vectors[number] for number in numbers])
        off = float((vectors - truth).abs().max())
        return f"/embed: off by {off:.1e}" if off > _MOST_OFF else None

    def _request(self) -> tuple[str, dict[str, Any]]:
        number, tokens = self.chosen.randrange(TEXTS), self.chosen.randint(1, LONGEST)
        body = {"prompt": self.known.texts[number], "max_tokens": tokens, "temperature": 0}
        return self.known.answers[number][:tokens], body

    def _complete(self) -> str | None:
        truth, body = self._request()
        with self._post("/v1/completions", body) as answer:
            said = json.loads(answer.read())["choices"][0]["text"]
        return None if said == truth else f"completion: {said!r} instead of {truth!r}"

    def _stream(self) -> str | None:
        truth, body = self._request()
        leaves = self.chosen.randrange(body["max_tokens"]) if self.chosen.random() < _LEFT else None
        said, chunks, has_left = "", 0, False
        with self._post("/v1/completions", {**body, "stream": True}) as answer:
            for line in answer:
                if chunks == leaves:
                    has_left = True
                    break
                if line.startswith(b"data: {"):
                    said += json.loads(line[6:])["choices"][0]["text"]
                    chunks += 1
        self.counts.left += has_left
        right = truth.startswith(said) if has_left else said == truth
        return None if right else f"stream: {said!r} instead of {truth!r}"


def load(minutes: float, clients: int, requests: int | None = None) -> Counts:
    """Start a server, send requests until the time or the number of requests is reached, and end it.

    Raises:
        RuntimeError, subprocess.TimeoutExpired: the server did not start, ended by itself, or did not end; see `server`.
    """
    with tempfile.TemporaryDirectory() as folder:
        embedder = tiny.save_embedder(Path(folder) / "embedder")
        writer = tiny.writer(positions=512, end=None)
        known = expected(writer, embedder)
        writer.save_pretrained(Path(folder) / "writer")
        tiny.byte_tokenizer().save_pretrained(Path(folder) / "writer")
        start = command(f"embed={embedder}", f"write={Path(folder) / 'writer'}", dtype="float32", threads=1)
        with server(start) as (port, process):
            return _ask_all(port, process, known, minutes, clients, requests)


def _ask_all(
    port: int, process: psutil.Process, known: Expected, minutes: float, clients: int, requests: int | None
) -> Counts:
    counts, numbers, over = Counts(), itertools.count(), threading.Event()
    begun = time.monotonic()

    def work(seed: int) -> None:
        client = Client(port, known, counts, seed)
        while not over.is_set() and (requests is None or next(numbers) < requests):
            client.ask()

    def weigh() -> None:
        if process.status() == psutil.STATUS_ZOMBIE:
            raise RuntimeError(
                f"the server has ended; {counts.asked} requests were sent, {counts.failed[:1]}"
            )
        counts.memory.append((time.monotonic() - begun, process.memory_info().rss))

    weigh()
    with ThreadPoolExecutor(clients) as threads:
        asking = [threads.submit(work, seed) for seed in range(clients)]
        try:
            while (
                time.monotonic() < begun + 60 * minutes and wait(asking, min(5.0, 60 * minutes / 50)).not_done
            ):
                weigh()
        finally:  # also where this is broken off, as the pool waits for its threads
            over.set()
    for client in asking:
        client.result()
    return counts


def main(
    minutes: Annotated[float, typer.Option(min=0.01)] = 30,
    clients: Annotated[int, typer.Option(min=1, max=64)] = 8,
    requests: Annotated[int | None, typer.Option(min=1, help="Maximum number of requests.")] = None,
) -> None:
    """Print the clients' counts and the server's memory."""
    counts = load(minutes, clients, requests)
    for seconds, size in counts.memory[:: max(1, len(counts.memory) // 10)]:
        print(f"{seconds:7.0f} s {size / 1e6:8.1f} MB")
    for kind, lines in (("wrong", counts.wrong), ("failed", counts.failed)):
        for line in lines[:5]:
            print(f"{kind}: {line}")
    print(
        f"{counts.asked} requests, {counts.left} left in the middle; {len(counts.wrong)} wrong, {len(counts.failed)} failed; "
        f"memory {counts.growth:+.1%}",
        flush=True,
    )
    raise typer.Exit(int(bool(counts.wrong or counts.failed or counts.growth > MOST_GROWTH)))


if __name__ == "__main__":
    typer.run(main)
