"""The public names are those of docs/reference/api.md, and they change only on purpose: tests/public_api.txt has them all."""

from __future__ import annotations

import difflib
import importlib
import re
import warnings

import pytest

import hf_cpu_accel
from tests import public_api

UPDATE = (
    "The public API differs from tests/public_api.txt. If that is on purpose, run `python -m tests.public_api` and "
    "write the change into CHANGELOG.md. A name that goes away is deprecated for one minor release first: see "
    "docs/reference/api.md."
)


def test_the_public_names_are_those_of_the_list() -> None:
    listed = public_api.LIST.read_text().splitlines()
    changes = list(
        difflib.unified_diff(listed, public_api.lines(), "tests/public_api.txt", "sources", "", "", 0, "")
    )
    assert not changes, "\n".join([UPDATE, *changes])


def test_a_change_is_shown_with_the_command_that_updates_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line.replace("verify: bool", "verify: int") for line in public_api.lines()]
    monkeypatch.setattr(public_api, "lines", lambda: [*lines, "hf_cpu_accel.new() -> None"])
    with pytest.raises(AssertionError) as raised:
        test_the_public_names_are_those_of_the_list()
    assert "run `python -m tests.public_api`" in str(raised.value)
    assert "CHANGELOG.md" in str(raised.value)
    assert "+hf_cpu_accel.new() -> None" in str(raised.value)


def test_all_names_of_the_package_are_on_the_page() -> None:
    names = {f"hf_cpu_accel.{name}" for name in hf_cpu_accel.__all__}
    assert names <= set(public_api.public_names())
    assert len(hf_cpu_accel.__all__) == len(set(hf_cpu_accel.__all__))


def test_no_name_is_on_the_page_twice() -> None:
    names = public_api.public_names()
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", [*public_api.public_names(), *public_api.generated_names()])
def test_public_names_exist_and_are_not_deprecated(name: str) -> None:
    if "CPU" in name:
        pytest.importorskip("optimum" if "Model" in name or "Saved" in name else "diffusers")
    module, _, attribute = name.rpartition(".")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*hf_cpu_accel", category=DeprecationWarning)
        assert getattr(importlib.import_module(module), attribute).__doc__


def test_the_deprecated_module_warns_and_is_not_public() -> None:
    from hf_cpu_accel import hardware

    with pytest.warns(DeprecationWarning, match=r"has moved to hf_cpu_accel\.runtime\.hardware"):
        _ = hardware.detect
    assert not [name for name in public_api.public_names() if name.startswith("hf_cpu_accel.hardware")]
    assert re.search(r"`hf_cpu_accel.hardware` is deprecated", public_api.PAGE.read_text())
