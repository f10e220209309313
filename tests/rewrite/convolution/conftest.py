"""Fixtures in which the convolutions of this package are the faster ones."""

from __future__ import annotations

import pytest

from hf_cpu_accel.rewrite.convolution import gemm


@pytest.fixture
def ours_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU where our convolutions were measured to be the faster ones."""
    monkeypatch.setattr(gemm, "native_is_faster", lambda *args, **kwargs: True)
    monkeypatch.setattr("hf_cpu_accel.providers.switch.why_not", lambda *args: None)
    monkeypatch.setattr("hf_cpu_accel.providers.choice.FEWEST_ROWS", 1 << 40)  # and nothing else is measured
    monkeypatch.setattr("hf_cpu_accel.providers.route.FEWEST_ROWS", 1 << 40)
