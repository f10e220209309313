"""A server under load: random lengths, clients that leave, every answer checked, and its memory.

    python -m benchmarks.serving.load [--minutes 30] [--clients 8] [--requests 100000]

`hf-cpu-accel serve` as a process, on 127.0.0.1 alone, with the small random models of the tests in float32: a language model
and an embedder, whose answers are known beforehand from the models themselves. Each client asks one request after another: a
completion, whole or streamed, or texts to embed. A third of the streams is left in the middle. The exit code is 1 if an answer
was wrong, a request failed, or memory at the end was more than 2 % above that of the second fifth.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer

from tests.serve import tiny
from tests.serve.process import Process

MOST_GROWTH = 0.02
TEXTS, LONGEST = 24, 48
_LEFT = 1 / 3
_MOST_OFF = 1e-4


@dataclasses.dataclass
class Expected:
    """What the models say by themselves: of each text the tokens that follow, and of each sentence its vector."""

    texts: list[str]
    answers: list[str]
    sentences: list[str]
    vectors: list[torch.Tensor]


@dataclasses.dataclass
class Counts:
    """What clients have seen. memory: (seconds, bytes of the server)."""

    asked: int = 0
    left: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    failed: list[str] = dataclasses.field(default_factory=list)
    memory: list[tuple[float, int]] = dataclasses.field(default_factory=list)

    @property
    def growth(self) -> float:
        """Of the last fifth's memory over that of the second fifth: in the first, caches fill."""
        sizes = [size for _, size in self.memory]
        fifth = max(1, len(sizes) // 5)
        return statistics.median(sizes[-fifth:]) / statistics.median(sizes[fifth : 2 * fifth] or sizes) - 1


def expected(writer: Any, embedder: Path) -> Expected:
    """Ask the models, one text after another."""
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
    """Asks one request after another, and checks what comes."""

    def __init__(self, port: int, known: Expected, counts: Counts, seed: int) -> None:
        self.port, self.known, self.counts = port, known, counts
        self.chosen = random.Random(seed)

    def ask(self) -> None:
        """One request."""
        kinds = (self._embed, self._complete, self._stream)
        try:
            wrong = self.chosen.choice(kinds)()
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            self.counts.failed.append(f"{type(error).__name__}: {error}")
        else:
            if wrong is not None:
                self.counts.wrong.append(wrong)
        self.counts.asked += 1

    def _post(self, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        self.connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = self.connection.getresponse()
        if answer.status != 200:
            raise ValueError(f"{path}: {answer.status} {answer.read().decode()[:200]}")
        return answer

    def _embed(self) -> str | None:
        numbers = self.chosen.choices(range(TEXTS), k=self.chosen.randint(1, 8))
        body = {"inputs": [self.known.sentences[number] for number in numbers]}
        with contextlib.closing(self._post("/embed", body)) as answer:
            vectors = torch.tensor(json.loads(answer.read()))
        self.connection.close()
        truth = torch.stack([self.known.vectors[number] for number in numbers])
        off = float((vectors - truth).abs().max())
        return f"/embed: off by {off:.1e}" if off > _MOST_OFF else None

    def _request(self) -> tuple[str, dict[str, Any]]:
        number, tokens = self.chosen.randrange(TEXTS), self.chosen.randint(1, LONGEST)
        body = {"prompt": self.known.texts[number], "max_tokens": tokens, "temperature": 0}
        return self.known.answers[number][:tokens], body

    def _complete(self) -> str | None:
        truth, body = self._request()
        with contextlib.closing(self._post("/v1/completions", body)) as answer:
            said = json.loads(answer.read())["choices"][0]["text"]
        self.connection.close()
        return None if said == truth else f"completion: {said!r} instead of {truth!r}"

    def _stream(self) -> str | None:
        truth, body = self._request()
        leaves = self.chosen.randint(0, LONGEST) if self.chosen.random() < _LEFT else None
        said, chunks = "", 0
        with contextlib.closing(self._post("/v1/completions", {**body, "stream": True})) as answer:
            for line in answer:
                if chunks == leaves:
                    self.counts.left += 1
                    break
                if line.startswith(b"data: {"):
                    said += json.loads(line[6:])["choices"][0]["text"]
                    chunks += 1
        self.connection.close()
        right = truth.startswith(said) if chunks == leaves else said == truth
        return None if right else f"stream: {said!r} instead of {truth!r}"


def load(minutes: float, clients: int, requests: int) -> Counts:
    """Start a server, ask it for so long, or so many requests in all, and end it."""
    counts = Counts()
    with tempfile.TemporaryDirectory() as folder:
        embedder = tiny.save_embedder(Path(folder) / "embedder")
        writer = tiny.writer(positions=512, end=None)
        known = expected(writer, embedder)
        writer.save_pretrained(Path(folder) / "writer")
        tiny.byte_tokenizer().save_pretrained(Path(folder) / "writer")
        server = Process(f"embed={embedder}", f"write={Path(folder) / 'writer'}")
        try:
            _ask_all(server, known, counts, minutes, clients, requests)
        finally:
            server.child.terminate()
            server.child.communicate(timeout=90)
    return counts


def _ask_all(
    server: Process, known: Expected, counts: Counts, minutes: float, clients: int, requests: int
) -> None:
    begun = time.monotonic()
    end = begun + 60 * minutes

    def work(seed: int) -> None:
        client = Client(server.port, known, counts, seed)
        while time.monotonic() < end and counts.asked < requests and server.child.poll() is None:
            client.ask()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    process = psutil.Process(server.child.pid)
    while any(thread.is_alive() for thread in threads):
        counts.memory.append((time.monotonic() - begun, process.memory_info().rss))
        time.sleep(min(5.0, 60 * minutes / 50))
    for thread in threads:
        thread.join()


def main(
    minutes: Annotated[float, typer.Option(min=0.01)] = 30,
    clients: Annotated[int, typer.Option(min=1, max=64)] = 8,
    requests: Annotated[int, typer.Option(min=1, help="At most so many in all.")] = 1_000_000,
) -> None:
    """Print what clients saw, and the server's memory."""
    counts = load(minutes, clients, requests)
    for seconds, size in counts.memory[:: max(1, len(counts.memory) // 10)]:
        print(f"{seconds:7.0f} s {size / 1e6:8.1f} MB")
    for what, told in (("wrong", counts.wrong), ("failed", counts.failed)):
        for line in told[:5]:
            print(f"{what}: {line}")
    print(
        f"{counts.asked} requests, {counts.left} left in the middle; {len(counts.wrong)} wrong, {len(counts.failed)} failed; "
        f"memory {counts.growth:+.1%}"
    )
    raise typer.Exit(bool(counts.wrong or counts.failed or counts.growth > MOST_GROWTH))


if __name__ == "__main__":
    typer.run(main)
