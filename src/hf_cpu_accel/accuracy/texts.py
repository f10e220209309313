"""Texts to measure on where no examples are given: prose, speech, documentation, code and numbers, short and long."""

from __future__ import annotations

from importlib import resources


def built_in_texts() -> list[str]:
    """Those of texts.txt, between the lines of dashes."""
    text = resources.files("hf_cpu_accel.accuracy").joinpath("texts.txt").read_text(encoding="utf-8")
    return text.strip().split("\n---\n")
