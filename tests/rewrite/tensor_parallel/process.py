"""One of two processes, whose rank is in the environment; writes FOLDER/rank<n>.json about each model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_cpu_accel import explain
from tests.rewrite.tensor_parallel.models import report, tokens


def problem(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def main(folders: list[str]) -> None:
    rank = os.environ["RANK"]
    for folder in map(Path, folders):
        two = DistributedConfig(tp_size=2)
        found = report(folder, distributed_config=two)
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=two, cpu_optimize="float32")
        found["keyword"] = {"dtype": explain(model).dtype, "tokens": tokens(model)}
        again = folder / "again"
        found["saving"] = problem(lambda model=model, again=again: model.save_pretrained(again))
        packed = folder / "packed"
        found["packed"] = problem(
            lambda packed=packed, two=two: AutoModelForCausalLM.from_pretrained(
                packed, distributed_config=two
            )
        )
        (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
