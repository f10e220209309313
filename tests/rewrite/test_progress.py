"""Slow packing shows a progress bar, unless the bars of hosts are off."""

import diffusers
import pytest
import torch
import transformers
from torch import nn

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.rewrite import progress


@pytest.fixture(autouse=True)
def _bars():
    """Other tests of the process may have switched the hosts' bars off."""
    for host in (transformers, diffusers):
        host.utils.logging.enable_progress_bar()


def _accelerate():
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).eval()
    accelerate_for_cpu(model, dtype="bfloat16")
    return sum(parameter.numel() for parameter in (model[0].bias, model[2].bias))


def test_the_bar_counts_the_bytes_of_all_weights(monkeypatch, capsys):
    monkeypatch.setattr(progress, "DELAY", 0.0)
    biases = _accelerate()
    total = f"{4 * (2 * 64 * 96 + biases) / 1000:.1f}k/"
    assert f"Packing weights: 100%|##########| {total}" in capsys.readouterr().err.replace("█", "#")


@pytest.mark.parametrize("host", [transformers, diffusers])
def test_the_hosts_switch_it_off(host, monkeypatch, capsys):
    monkeypatch.setattr(progress, "DELAY", 0.0)
    host.utils.logging.disable_progress_bar()
    try:
        _accelerate()
    finally:
        host.utils.logging.enable_progress_bar()
    assert "Packing" not in capsys.readouterr().err


def test_what_is_quick_has_no_bar(capsys):
    with torch.no_grad():
        _accelerate()
    assert "Packing" not in capsys.readouterr().err
