"""The built-in texts to measure accuracy on: prose, speech, documentation, code and numbers, short and long."""

from __future__ import annotations

from importlib import resources


def built_in_texts() -> list[str]:
    """Return the texts of texts.txt, which lines of dashes separate."""
    text = resources.files("hf_cpu_accel.accuracy").joinpath("texts.txt").read_text(encoding="utf-8")
    return text.strip().split("\n---\n")
