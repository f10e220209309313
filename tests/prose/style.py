"""The checks of this project, as proselint checks; the models are the docs of PyTorch and the Google developer style guide."""

from __future__ import annotations

import re
from collections.abc import Iterator

from proselint.registry.checks import Check, CheckResult
from proselint.registry.checks.types import Existence, PreferredForms

MOST_WORDS = 25  # of a sentence; a code span counts as one word

VAGUE = (
    r"(?:is|are|was|were) told",
    r"what (?:becomes?|became) of",
    r"what no\b",
    r"what (?:cannot|can) be",
    r"whatever",
    r"of which",
    r"so much as",
    r"such as (?:are|is|were)",
    r"in words",
    r"stands? in for",
    r"there is (?:none|no one) (?:who|that|which)",
    r"but for (?:the|a|an|its|their|graph)",
    r"foretells?",
    r"foretold",
    r"goes? by the name",
    r"makes? of it",
    r"anew",
    r"mend(?:s|ed|ing)?",
    r"nobody",
    r"somebody",
    r"whoever",
    r"lest",
    r"thereby",
    r"thereof",
    r"therein",
    r"whereof",
    r"whereupon",
    r"upon",
    r"likewise",
    r"forthwith",
)
PLAIN = {
    r"32-bit floats?": "float32",
    r"16-bit brain floats?": "bfloat16",
    r"8-bit integers?": "int8",
    r"4-bit integers?": "int4",
    r"tokens? (?:per|a) second": "tokens/s",
    r"speed-ups?": "speedup",
    r"key-value cache": "KV cache",
    r"PyTorch as it is": "PyTorch (eager)",
    r"utili[sz]e[sd]?": "use",
    r"in order to": "to",
    r"amongst": "among",
    r"whilst": "while",
    r"towards": "toward",
    r"graphics cards?": "GPU",
}


def long_sentences(text: str, check: Check) -> Iterator[CheckResult]:
    """Yield the sentences of more than `MOST_WORDS` words. Paragraphs end at blank lines."""
    for unit in re.finditer(r"[^\n]+(?:\n(?!\s*\n)[^\n]+)*", text):
        start = unit.start()
        for sentence in re.split(r"(?<=[.!?:])(?=\s+)", unit[0]):
            words = re.findall(r"[\w`]\S*", sentence)
            if len(words) > MOST_WORDS:
                yield CheckResult(
                    check.path,
                    f"{len(words)} words, {MOST_WORDS} at most: {' '.join(words[:6])} ...",
                    (start + len(sentence) - len(sentence.lstrip()), start + len(sentence)),
                    None,
                )
            start += len(sentence)


def semicolon_chains(text: str, check: Check) -> Iterator[CheckResult]:
    """Yield the sentences with two or more semicolons."""
    for sentence in re.finditer(r"[^.!?\n]*;[^.!?;\n]*;[^.!?\n]*", text):
        yield CheckResult(check.path, "two semicolons in a sentence: use a list", sentence.span(), None)


PHRASES = (
    Check(Existence(VAGUE), path="style.vague", message="'{}': name the thing, in plain words."),
    Check(PreferredForms(PLAIN), path="style.plain", message="'{1}': write '{0}'."),
)
SENTENCES = (  # of pages; docstrings have formulas and lists of arguments
    Check(long_sentences, path="style.long_sentence"),
    Check(semicolon_chains, path="style.semicolons"),
)
# Of proselint's own checks, those that are about more than taste in fiction.
FROM_PROSELINT = (
    "archaism",
    "cliches",
    "hedging",
    "industrial_language",
    "malapropisms",
    "misc.apologizing",
    "misc.but",
    "misc.preferred_forms",
    "misc.pretension",
    "misc.whence",
    "mixed_metaphors",
    "needless_variants",
    "nonwords",
    "oxymorons",
    "redundancy",
    "spelling.able_atable",
    "spelling.athletes",
    "weasel_words",
)
# Docstrings have matrices.
FROM_PROSELINT_FOR_PAGES = ("lexical_illusions",)
