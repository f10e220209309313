"""The high-water mark sees what was freed before the block ended."""

from pathlib import Path

import pytest
import torch

from hf_cpu_accel.measure import PeakMemory, peak_memory

MEGABYTE = 1 << 20


def test_peak_counts_memory_that_is_already_gone() -> None:
    with PeakMemory() as peak:
        big = torch.ones(100 * MEGABYTE, dtype=torch.uint8)
        del big
        kept = torch.ones(10 * MEGABYTE, dtype=torch.uint8)
    assert peak.peak_bytes is not None
    assert 95 * MEGABYTE < peak.peak_bytes < 125 * MEGABYTE
    assert kept[0] == 1


def test_unknown_where_the_mark_cannot_be_reset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peak_memory, "_PROC", tmp_path / "nowhere")
    with PeakMemory() as peak:
        pass
    assert peak.peak_bytes is None
