"""What is measured: well-known shapes with random weights, at batch sizes and lengths that servers see."""

from __future__ import annotations

import re
from functools import partial

from hf_cpu_accel.cli.bench_workload import Workload, workload

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


def parse(name: str) -> Workload:
    """`model:BATCHxTOKENS`, e.g. `bert-base-uncased:1x128`; ValueError for anything else."""
    match = re.fullmatch(r"(?P<model>[^:]+):(?P<batch>\d+)x(?P<seq>\d+)", name)
    if match is None:
        raise ValueError(f"workload {name!r} is not of the form MODEL:BATCHxTOKENS, e.g. {DEFAULT[0]}")
    make = partial(workload, None, match["model"], "feature-extraction")
    return make(int(match["batch"]), int(match["seq"]))
