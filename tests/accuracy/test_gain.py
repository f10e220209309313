"""What `explain` says that `accuracy` may gain, and the order of the candidates."""

import pytest
from torch import nn

from hf_cpu_accel import accelerate_for_cpu, explain
from hf_cpu_accel.accuracy import candidates as module
from hf_cpu_accel.accuracy.candidates import candidates, gain
from hf_cpu_accel.extension import ExtensionStatus
from tests.accuracy.models import bert, llama, token_ids


def on(monkeypatch, tier, *, bf16_dot=False):
    status = ExtensionStatus(loaded=True, error=None, tier=tier, bf16_dot=bf16_dot, path=None)
    monkeypatch.setattr(module.extension, "status", lambda: status)


@pytest.mark.parametrize(
    ("tier", "bf16_dot", "expected"),
    [
        ("avx2", False, ("int8", "int8-weight", "bfloat16", "float32")),
        ("avx512_vnni", False, ("int8", "int8-weight", "bfloat16", "float32")),
        ("avx512_bf16", True, ("int8", "bfloat16", "float32")),
        ("amx", True, ("int8", "int8-weight", "bfloat16", "float32")),
    ],
)
def test_candidates_are_sorted_by_speed(monkeypatch, tier, bf16_dot, expected):
    on(monkeypatch, tier, bf16_dot=bf16_dot)
    model = nn.Linear(4, 4)
    assert candidates(model) == expected
    times = [gain(dtype, "float32", generates=False) for dtype in expected]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.5


def test_candidates_of_decoders_are_sorted_by_size():
    model = llama()
    assert candidates(model) == ("int8", "int8-weight", "bfloat16", "float32")  # it stays in the cache
    assert candidates(model, 10**10) == ("int4", "int8", "int8-weight", "bfloat16", "float32")
    times = [gain(dtype, "bfloat16", generates=True) for dtype in candidates(model, 10**10)]
    assert times == sorted(times, reverse=True)


def line(model):
    return [note for note in explain(model).notes if note.startswith("accuracy=")]


def test_default_settings_get_a_note():
    (told,) = line(accelerate_for_cpu(bert()))
    assert told.startswith(
        "accuracy=0.99 would use int8 where the accuracy allows it, with a speedup of up to "
    )
    assert "modeled from the speed of products on this CPU" in told
    assert "not measured" in told
    (told,) = line(accelerate_for_cpu(llama()))
    assert "2.0x over bfloat16 (modeled from the bytes of weights" in told


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int8"},
        {"dtype": "bfloat16"},
        {"dtypes": {"pooler": "float32"}},
        {"accuracy": 0.9, "examples": token_ids(1)},
    ],
    ids=["int8", "bfloat16", "dtypes", "accuracy"],
)
def test_explicit_settings_get_no_note(options):
    assert not line(accelerate_for_cpu(bert(), **options))
