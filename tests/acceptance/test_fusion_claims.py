"""What pages say of the fusion of a model type is what the sweep found, which docs/reference/models.md has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.documents import DOCUMENTS, ROOT, title

MODELS = ROOT / "docs" / "reference" / "models.md"
PAGES = [page for page in DOCUMENTS if page != MODELS]
# Words by which a sentence, or a row of a table, says that layers run as a whole, or that they do not.
WHOLE = re.compile(
    r"each layer is one call|layers? runs? as a whole|as one call each|layer by layer|recogni[sz]ed by what they do"
    r"|\b(is|are) recorded\b|\| fused \|",
    re.IGNORECASE,
)
PARTS = re.compile(
    r"\bnot (\w+ )?fused\b|\b(partly|partially) fused|fused (only )?in part|\bin parts\b|(their|the|of these the) parts (are|run)"
    r"|not whole|parts? of (it|them) (is|are) fused|projections and feed-forward networks, each",
    re.IGNORECASE,
)
# How pages call types whose names differ from their own; those of a row's first cells are often short.
ALIASES = {
    "debertav1": "deberta",
    "firstdeberta": "deberta",
    "ast": "audio-spectrogram-transformer",
    "dino": "vit",
    "xlmr": "xlm-roberta",
    "mbart50": "mbart",
}


def sweep_results() -> dict[str, tuple[int, int]]:
    """Return {type: (layers that run as a whole, layers)} of the types that have transformer layers."""
    rows = re.findall(
        r"^\| (\S+) \|.*\| (\d+)/(\d+) \|[^|]*\|$", MODELS.read_text(encoding="utf-8"), re.MULTILINE
    )
    return {name: (int(whole), int(layers)) for name, whole, layers in rows}


RESULTS = sweep_results()
TYPES = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in RESULTS} | ALIASES


def units(text: str) -> Iterator[str]:
    """Rows of tables, and the sentences of everything else but code."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    yield from rows
    prose = "\n".join("" if line.startswith("|") else line for line in text.splitlines())
    for paragraph in re.split(r"\n\s*\n|\n(?=[-#])", prose):
        yield from re.split(r"(?<=[.;])\s+(?=[A-Z`*(])", " ".join(paragraph.split()))


def types_in(unit: str) -> set[str]:
    """Model types that a sentence names: longest names first, spelled with a capital or a digit."""
    words = re.findall(r"[A-Za-z0-9][\w.+-]*", re.sub(r"'s\b|`", "", unit))
    found, at = set(), 0
    while at < len(words):
        for length in (3, 2, 1):
            name = "".join(words[at : at + length])
            key = re.sub(r"[^a-z0-9]", "", name.lower())
            if key in TYPES and re.search(r"[A-Z0-9]", name):
                found.add(TYPES[key])
                at += length - 1
                break
        at += 1
    return found


def contradictions(text: str) -> list[str]:
    """Return what a page says of a type that the sweep has found otherwise."""
    wrong = []
    for unit in units(text):
        says_parts, says_whole = PARTS.search(unit), WHOLE.search(unit)
        for name in sorted(types_in(unit)) if bool(says_parts) != bool(says_whole) else ():
            whole, layers = RESULTS[name]
            if (whole == layers) == bool(says_parts):
                wrong.append(f"{name} has {whole} of {layers} layers whole, and the page says: {unit[:200]}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_no_page_contradicts_the_sweep(page: Path) -> None:
    assert contradictions(page.read_text(encoding="utf-8")) == []


def test_the_sweep_is_read_whole() -> None:
    stated = re.search(
        r"(\d+) types have transformer layers. All layers run as a whole in (\d+)", MODELS.read_text("utf-8")
    )
    assert stated is not None
    assert len(RESULTS) == int(stated[1])
    assert sum(whole == layers for whole, layers in RESULTS.values()) == int(stated[2])


def test_claims_are_found() -> None:
    """On real pages, so that other words for the same do not leave the test without anything to compare."""
    named = {
        name
        for page in PAGES
        for unit in units(page.read_text(encoding="utf-8"))
        if WHOLE.search(unit) or PARTS.search(unit)
        for name in types_in(unit)
    }
    assert {"vit", "wav2vec2", "beit", "swin", "llama", "gpt2", "segformer", "vits"} <= named
    assert len(named) > 40


@pytest.mark.parametrize(
    ("text", "types"),
    [
        ("Not fused are layers (the first DeBERTa, BEiT,\nRoFormer): of these the parts are.", ["beit", "deberta", "roformer"]),
        ("| Swin v2, BEiT, SegFormer, SAM | attention, projections and feed-forward networks, each as one call |",
         ["beit", "sam", "segformer", "swinv2"]),
        ("| image-segmentation | SegFormer | partly fused | |", ["segformer"]),
        ("Of VITS each layer is one call.", ["vits"]),
        ("BERT's layers are not fused.", ["bert"]),
        ("BERT and VITS are quick. Layers are not fused here.", []),
        ("Swin's and T5's run layer by layer.", []),
    ],
)  # fmt: skip
def test_contradictions_are_seen(text: str, types: list[str]) -> None:
    assert [line.split(" ")[0] for line in contradictions(text)] == types
