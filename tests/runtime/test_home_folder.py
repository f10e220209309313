"""Where the package keeps its files."""

from __future__ import annotations

from pathlib import Path

from hf_cpu_accel.runtime.home_folder import home_folder


def test_order_of_choices() -> None:
    assert home_folder({"HF_CPU_ACCEL_HOME": "/own"}) == Path("/own")
    assert home_folder({"HF_CPU_ACCEL_HOME": ""}) == home_folder({}) == Path.home() / ".cache/hf_cpu_accel"


def test_tilde_is_the_home_folder() -> None:
    assert home_folder({"HF_CPU_ACCEL_HOME": "~/x"}) == Path.home() / "x"
