"""Workloads, by name: well-known shapes with random weights, at batch sizes and lengths that servers see.

Text encoders are here, models that generate text in writing.py, models of images and sound in media.py, graph neural networks in
graphs.py.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.workloads import graphs, media, writing
from benchmarks.workloads.graphs import GraphNetwork
from benchmarks.workloads.media import Media
from benchmarks.workloads.writing import Writing
from hf_cpu_accel.cli.bench import workload as bench_workload

# The first two are the ones that the project's speed goals name.
DEFAULT = (
    "bert-base-uncased:1x128",
    "all-MiniLM-L6-v2:1x32",
    "all-MiniLM-L6-v2:32x64",
    "bert-base-uncased:1x32",
    "bert-base-uncased:8x128",
    "bert-base-uncased:1x512",
    "distilbert-base-uncased:1x128",
    "roberta-base:1x128",
    "deberta-v3-small:1x128",
    "ModernBERT-base:1x128",
)
# Translation and summaries, end to end.
WRITING = ("t5-small:1x32+64", "bart-base:1x512+64")
# Where the project means to be ahead of every rival.
AGAINST_RIVALS = (
    "bert-base-uncased:1x32",
    "bert-base-uncased:1x128",
    "bert-base-uncased:8x128",
    "bert-base-uncased:1x512",
    "all-MiniLM-L6-v2:1x32",
    "all-MiniLM-L6-v2:32x64",
    "distilbert-base-uncased:1x128",
    "deberta-v3-base:1x128",
    "deberta-v3-base:8x128",
    "roberta-base:16x8-128",
)
# Models whose layers are of no known form: they are recorded.
WITHOUT_RULE = (
    "mobilebert-uncased:1x128",
    "conv-bert-base:1x128",
    "xlnet-base-cased:1x128",
    "roformer_chinese_base:1x128",
    "rembert:1x128",
    "squeezebert-uncased:1x128",
    "levit-128:1",
    "regnet-y-040:1",
    "poolformer-s12:1",
)
# What `benchmarks.versus --baseline` compares, WORKLOAD=DTYPE: each kind of layer, and each way to run one.
BASELINE = (
    "bert-base-uncased:1x128=float32",
    "bert-base-uncased:1x128=bfloat16",
    "bert-base-uncased:1x128=int8",
    "all-MiniLM-L6-v2:1x32=float32",
    "all-MiniLM-L6-v2:32x64=int8",
    "roberta-base:8x16-128=bfloat16",
    "deberta-v3-small:1x128=float32",
    "deberta-v3-small:1x128=int8",
    "ModernBERT-base:1x128=float32",
    "mobilebert-uncased:1x128=float32",
    "conv-bert-base:1x128=int8",
    "xlnet-base-cased:1x128=float32",
    "t5-small:1x32+16=float32",
    "bart-base:1x128+16=int8",
    "gpt2:1x128=float32",
    "gpt2:1x32+16=bfloat16",
    "SmolLM2-135M:1x32+16=int8",
    "vit-base:1=float32",
    "swin-t:1=float32",
    "levit-128:1=float32",
    "resnet-50:1=float32",
    "whisper-base-encoder:1=int8",
    "flux-mini:1=float32",
    "SAGE:20000x100000=float32",
)

_EXAMPLES = 8  # batches of other random inputs for static quantization
_CALL_THEIR_POOLER = ("squeezebert",)  # without a look whether they have one


@dataclass(frozen=True)
class Workload:
    """One model without its pooler, whose last hidden state is the answer, on one batch.

    lengths: real tokens of each row. padded: the same model on rows that are all as long as the longest.
    """

    lengths: tuple[int, ...]
    padded: bench_workload.Workload

    def build(self) -> nn.Module:
        """The float32 eager model; the same weights in every process."""
        model = self.padded.build()
        # Exporters drop a pooler that the answer does not need; with it here, systems would not do the same work.
        if getattr(model, "pooler", None) is not None:
            model.pooler = nn.Identity().eval() if model.config.model_type in _CALL_THEIR_POOLER else None
        return model

    def inputs(self, model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
        """Random token ids, the pad token where a row is short, and their mask, both int64 [batch, longest]."""
        ids = self.padded.inputs(model, seed)["input_ids"]
        mask = self.mask()
        pad: int = getattr(model.config, "pad_token_id", None) or 0
        return {"input_ids": torch.where(mask, ids, pad), "attention_mask": mask.long()}

    def forward(self, model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
        """[last hidden state [batch, longest, features]], without gradients."""
        return self.padded.forward(model, inputs)

    def mask(self) -> Tensor:
        """bool [batch, longest], True at real tokens."""
        return torch.arange(max(self.lengths)) < torch.tensor(self.lengths).unsqueeze(1)

    def real_tokens(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Outputs [batch, longest, features] as [real tokens, features].

        What stands at padding is undefined: eager leaves values there, others zeros.
        """
        return [output[self.mask()] for output in outputs]


def examples(
    workload: Workload | Media | Writing | GraphNetwork, model: nn.Module
) -> list[dict[str, Tensor]]:
    """Return calibration batches: shapes of the measured batches, other random values."""
    return [workload.inputs(model, seed) for seed in range(1, 1 + _EXAMPLES)]


def parse(name: str) -> Workload | Writing | Media | GraphNetwork:
    """`model:BATCHxTOKENS`, e.g. `bert-base-uncased:1x128`, or `model:BATCHxSHORTEST-LONGEST`, or, for models that generate as many
    tokens, `model:BATCHxTOKENS+NEW`, or, for images, sound and diffusion, `model:BATCH`, or, for graph neural networks,
    `model:NODESxEDGES`; else ValueError.

    The lengths of the second form are spread evenly over the range, both ends included, in an order that is mixed
    but always the same.
    """
    found = media.media(name)
    if found is not None:
        return found
    match = re.fullmatch(
        r"(?P<model>[^:]+):(?P<batch>\d+)x(?P<first>\d+)(-(?P<last>\d+)|\+(?P<new>\d+))?", name
    )
    if match is None or match["model"] in media.NAMES:  # images and sound have a size of their own
        raise ValueError(
            f"workload {name!r} is not of the form MODEL:BATCHxTOKENS, e.g. {DEFAULT[0]}, "
            f"MODEL:BATCHxSHORTEST-LONGEST, e.g. {AGAINST_RIVALS[-1]}, MODEL:BATCHxTOKENS+NEW, e.g. {WRITING[0]}, "
            f"MODEL:NODESxEDGES with one of {', '.join(graphs.NAMES)}, or MODEL:BATCH with one of {', '.join(media.NAMES)}"
        )
    batch, first = int(match["batch"]), int(match["first"])
    if match["new"] is not None:
        return writing.writing(match["model"], batch, first, int(match["new"]))
    if match["model"] in graphs.NAMES:
        return GraphNetwork(match["model"], batch, first)
    last = int(match["last"] or first)
    if not 1 <= first <= last or batch < 1 or (last > first and batch < 2):
        raise ValueError(
            f"workload {name!r}: needs at least one row and one token, and for a range of lengths two rows and "
            "SHORTEST <= LONGEST"
        )
    padded = bench_workload.workload(None, match["model"], "feature-extraction", batch, last)
    return Workload(spread_lengths(batch, first, last), padded)


def spread_lengths(batch: int, shortest: int, longest: int) -> tuple[int, ...]:
    """`batch` lengths, evenly from `shortest` to `longest`, mixed in an order that is always the same."""
    steps = max(1, batch - 1)
    lengths = [shortest + round(row * (longest - shortest) / steps) for row in range(batch)]
    random.Random(0).shuffle(lengths)
    return tuple(lengths)
