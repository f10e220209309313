"""Accelerated models in processes that are started afresh, and copies in this one."""

from __future__ import annotations

import concurrent.futures
import copy
import multiprocessing
import pickle

import pytest
import torch

from benchmarks.soak.served import SERVED
from hf_cpu_accel import accelerate_for_cpu, explain, restore
from tests.concurrency import other_process

MODELS = [("encoder", "int8"), ("decoder", "float32")]


@pytest.fixture(scope="module")
def spawned(tmp_path_factory):
    """What this process says of its models, and what another one does, which got them as files: all in one, which takes seconds."""
    folder, here = tmp_path_factory.mktemp("models"), {}
    for name, dtype in MODELS:
        served = SERVED[name]
        model = served.build()
        original = served.answer(model, 0)
        accelerate_for_cpu(model, dtype=dtype, threads=1)
        here[f"{name} {dtype}"] = {
            "replaced": len(explain(model).replaced),
            "answers": [served.answer(model, number).tolist() for number in range(2)],
            "restored": original.tolist(),
        }
        (folder / f"{name}-{dtype}").write_bytes(pickle.dumps(model))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        there = pool.submit(other_process.report, str(folder), MODELS)
        fresh = pool.submit(other_process.answers_of, "encoder", "int8")
        return here, there.result(), fresh.result()


@pytest.mark.parametrize(("name", "dtype"), MODELS)
def test_a_pickled_model_answers_the_same_in_another_process(spawned, name, dtype):
    here, there, _ = (part if isinstance(part, list) else part[f"{name} {dtype}"] for part in spawned)
    assert there["answers"] == here["answers"]
    assert there["replaced"] == here["replaced"] > 0
    if dtype == "float32":
        assert there["restored"] == here["restored"]
    else:
        assert "a pickled model does not include its original weights" in there["restored"]


def test_a_worker_that_accelerates_the_model_itself(spawned):
    here, _, fresh = spawned
    assert fresh == here["encoder int8"]["answers"]


@pytest.mark.parametrize(("name", "dtype"), MODELS)
def test_a_deep_copy_that_was_made_after_calls(name, dtype):
    """It has none of what threads, remembered tensors and measurements have left in the model."""
    served = SERVED[name]
    model = served.build()
    original = served.answer(model, 0)
    accelerate_for_cpu(model, dtype=dtype, threads=1)
    answer = served.answer(model, 0)
    twin = copy.deepcopy(model)
    assert torch.equal(served.answer(restore(model), 0), original)
    assert torch.equal(served.answer(twin, 0), answer)
    assert torch.equal(served.answer(restore(twin), 0), original)
