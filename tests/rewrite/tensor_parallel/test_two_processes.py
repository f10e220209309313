"""Models that transformers splits over two processes (gloo): the tokens of one process, and half of the weights each."""

from __future__ import annotations

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from hf_cpu_accel import accelerate_for_cpu
from tests.programs import run_program
from tests.rewrite.tensor_parallel.models import NEOX, report, save_llama, save_neox

Found = dict[str, Any]
MODELS = {"llama": save_llama, "neox": save_neox}


def start(home: Path) -> None:
    """Two processes, with what torchrun tells them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    source = f"""
import torch
torch.set_num_threads(1)
from tests.rewrite.tensor_parallel.process import main
main({[str(home / name) for name in MODELS]})
"""

    def process(rank: int) -> None:
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", **{name: str(n) for name, n in told.items()}}
        folder = home / f"rank{rank}"
        folder.mkdir()
        done = run_program(source, folder=folder, environment=environment)
        assert done.returncode == 0, done.stderr[-4000:]

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(process, range(2)))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Found, Found, Found]]:
    """For each model what one process has, and each of two."""
    home = tmp_path_factory.mktemp("divided")
    for name, save in MODELS.items():
        save(home / name)
        packed = accelerate_for_cpu(AutoModelForCausalLM.from_pretrained(home / name).eval(), dtype="int8")
        packed.save_pretrained(home / name / "packed", packed=True)
    start(home)
    return {
        name: (
            report(home / name),
            *(json.loads((home / name / f"rank{n}.json").read_text()) for n in (0, 1)),
        )
        for name in MODELS
    }


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_one_process(name: str, found: dict[str, tuple[Found, ...]]) -> None:
    one, *two = found[name]
    assert len(set(one["eager"])) > 8  # else any tokens would do
    for each in two:
        assert each["eager"] == each["float32"]["tokens"] == each["keyword"]["tokens"] == one["eager"]
        assert each["keyword"]["dtype"] == "float32"


@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_both_have_the_same_logits_as_near_as_one_process(
    name: str, dtype: str, found: dict[str, tuple[Found, ...]]
) -> None:
    """Each part of a row is quantized by itself, so that integers round otherwise than in one process, and no worse."""
    one, first, second = found[name]
    assert first[dtype]["tokens"] == second[dtype]["tokens"]
    assert first[dtype]["logits"] == second[dtype]["logits"]
    eager = torch.tensor(one["logits"])
    errors = [
        float((torch.tensor(each[dtype]["logits"]) - eager).norm() / eager.norm()) for each in (one, first)
    ]
    assert errors[1] <= max(1.5 * errors[0], 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_each_has_half_of_the_weights(name: str, dtype: str, found: dict[str, tuple[Found, ...]]) -> None:
    one, *two = found[name]
    for each in two:
        divided = each[dtype]["bytes"] - whole_table(name) / 2
        assert 0.49 < divided / one[dtype]["bytes"] < 0.56  # norms and biases of sums are in both


def whole_table(name: str) -> int:
    """Bytes of the table of words, which transformers leaves whole for GPT-NeoX before 5.24."""
    divides = any("embedding" in how for how in GPTNeoXConfig.base_model_tp_plan.values())
    return 0 if divides or name != "neox" else NEOX["vocab_size"] * NEOX["hidden_size"] * 4


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_says_what_is_divided_and_not_fused(name: str, found: dict[str, tuple[Found, ...]]) -> None:
    for each in found[name][1:]:
        assert any(
            "split over 2 processes and joined through shared memory" in note
            for note in each["int8"]["notes"]
        )
        assert [
            "decoder layer",
            "sums over processes run between its parts: its parts run separately",
        ] in each["int8"]["left"]


@pytest.mark.parametrize("name", MODELS)
def test_restore_brings_the_parts_back(name: str, found: dict[str, tuple[Found, ...]]) -> None:
    for each in found[name][1:]:
        assert each["restored"]
        assert each["same"]
        assert each["tokens again"] == each["eager"]


@pytest.mark.parametrize("name", MODELS)
def test_what_needs_whole_weights_is_refused(name: str, found: dict[str, tuple[Found, ...]]) -> None:
    for each in found[name][1:]:
        assert "is divided among processes and cannot be saved: call hf_cpu_accel.restore" in each["saving"]
        assert "cannot be divided among processes" in each["packed"]
