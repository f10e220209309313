"""SECURITY.md is what the scan of the sources says: `python -m tests.test_security_page` writes its generated part."""

from __future__ import annotations

import re

from hf_cpu_accel.rewrite.capture.program import Program, Ref, Step
from tests.test_nothing_is_run import _ARGUMENTS, _BUILTINS, _CALLS, _MODULES, ALLOWED, ROOT, SCANNED

PAGE = ROOT / "SECURITY.md"
BEGIN, END = "<!-- scan: begin -->", "<!-- scan: end -->"
# Numbers of places would be true until the next one.
_COUNTED = re.compile(
    r"\b(\d+|one|two|three|four|five|six|seven|eight|nine|ten)( of \w+)? places\b", re.IGNORECASE
)


def generated() -> str:
    """Return what the scan looks for, and the places where it may be, as Markdown."""
    rows = "\n".join(
        f"| `{file.removeprefix('src/hf_cpu_accel/')}` | {f'`{function}`' if function else 'whole file'} | {found} | {reason} |"
        for (file, function, found), reason in sorted(ALLOWED.items())
    )
    calls = _BUILTINS | {*_CALLS, "torch.load"}
    of_torch = {name for name in calls if name.startswith("torch.")}
    return (
        f"The scan reads {_names(set(SCANNED))}. It looks for:\n\n"
        f"- imports of {_names(_MODULES)};\n"
        f"- calls of {_names(calls - of_torch)};\n"
        f"- calls of {_names(of_torch)} (the last without `weights_only=True`);\n"
        f"- the arguments {_names(_ARGUMENTS)}.\n\n"
        f"It finds:\n\n| file | function | what is found | what it is for |\n|---|---|---|---|\n{rows}"
    )


def _names(names: set[str]) -> str:
    """Return names in order; `torch.load` last."""
    return ", ".join(f"`{name}`" for name in sorted(names, key=lambda name: (name == "torch.load", name)))


def rewritten(text: str) -> str:
    """Return the page with its generated part written anew."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{generated()}\n{END}{after}"


def test_the_page_has_the_list_of_the_scan() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == rewritten(text), "run `python -m tests.test_security_page`"


def test_the_page_counts_no_places() -> None:
    assert _COUNTED.findall(PAGE.read_text(encoding="utf-8")) == []
    assert _COUNTED.search("machine code is loaded in four places")
    assert _COUNTED.search("this is one of two places")


def test_each_kind_of_finding_has_its_words_outside_of_the_list() -> None:
    """A new kind of finding (a shell, say) needs a sentence, not only a row."""
    text = PAGE.read_text(encoding="utf-8")
    prose = text[: text.index(BEGIN)] + text[text.index(END) :]
    words = {
        "machine code": "## Machine code",
        "exec": "`exec`",
        "import pickle": "pickles over pairs of sockets",
    }
    assert {found for _, _, found in ALLOWED} == set(words)
    assert [word for word in words.values() if word not in prose] == []


def test_names_of_a_host_are_no_text_of_a_program() -> None:
    """What the page says of `exec`: an argument's name that is no identifier is a key, and never part of the text."""
    name = "a=1); raise SystemExit("
    step = Step(lambda **options: options, (), {name: 5}, Ref(1))
    assert Program(1, [step], Ref(1))([None]) == {name: 5}


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
