"""What test_families.py asks of a few families, of all; and of some of each kind with generated code. Not part of the suite."""

from __future__ import annotations

import pytest

from tests.compiler.families import FAMILIES
from tests.compiler.test_families import check

GENERATED = ("bert", "esm", "gpt2", "qwen3", "t5", "whisper", "resnet", "hubert", "siglip")


@pytest.mark.usefixtures("no_codegen")
@pytest.mark.parametrize("name", FAMILIES)
def test_the_rewritten_graph_gives_the_same(name: str) -> None:
    check(FAMILIES[name])


@pytest.mark.parametrize("name", GENERATED)
def test_generated_code_gives_the_same(name: str) -> None:
    check(FAMILIES[name])
