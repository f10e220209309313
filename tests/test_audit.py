"""What `make audit` says, from reports as pip-audit writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.audit import requirements, verdict

TORCH = {"name": "torch", "version": "2.13.0", "vulns": []}
OLD = {
    "name": "old",
    "version": "1.0",
    "vulns": [{"id": "CVE-1", "fix_versions": ["1.1", "2.0"]}, {"id": "CVE-2", "fix_versions": []}],
}
UNKNOWN = {"name": "ours", "skip_reason": "Dependency not found on PyPI and could not be audited: ours (0.1)"}


def report(*rows: dict[str, Any]) -> str:
    return json.dumps({"dependencies": rows, "fixes": []})


def test_nothing_is_known() -> None:
    assert verdict(report(TORCH), "") == (0, ["1 packages audited, 0 with known vulnerabilities"])


def test_what_is_known_is_listed_and_fails() -> None:
    status, lines = verdict(report(TORCH, OLD, UNKNOWN), "Found 2 known vulnerabilities in 1 package")
    assert status == 1
    assert lines == [
        "old 1.0: CVE-1, fixed in 1.1, 2.0",
        "old 1.0: CVE-2, fixed in no version",
        "not audited, unknown to the service: ours",
        "2 packages audited, 1 with known vulnerabilities",
    ]


@pytest.mark.parametrize(
    ("text", "errors", "said"),
    [
        (
            "",
            "WARNING\nERROR:pip_audit._cli:Connection refused",
            "could not be reached (ERROR:pip_audit._cli:Connection refused)",
        ),
        ("", "", "could not be reached (no message)"),
        ("[]", "", "could not be reached"),
        (report(UNKNOWN, UNKNOWN), "No known vulnerabilities found", "knows none of 2 packages"),
        (report(), "", "knows none of 0 packages"),
    ],
)
def test_that_nothing_was_audited_is_said_and_fails(text: str, errors: str, said: str) -> None:
    status, (line,) = verdict(text, errors)
    assert status == 2
    assert line.startswith("NOT AUDITED: ")
    assert said in line


def test_labels_of_builds_have_no_advisories_of_their_own() -> None:
    listed = ["torch==2.13.0+cpu", "numpy==2.4.0", "-e git+x", ""]
    assert requirements(listed) == ["torch==2.13.0", "numpy==2.4.0"]
