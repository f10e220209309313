"""What `make audit` asks of pip-audit: whether the versions installed here have known vulnerabilities, or whether nobody could say.

pip-audit alone ends with "No known vulnerabilities found" also where its service knew none of the packages.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NOT_AUDITED = 2


def requirements(listed: Iterable[str]) -> list[str]:
    """`name==version` as pip lists it, without the label of a build: torch 2.13.0+cpu has the advisories of 2.13.0."""
    return [re.sub(r"\+.*", "", line) for line in listed if "==" in line]


def verdict(report: str, errors: str) -> tuple[int, list[str]]:
    """The exit status and what to say, from what pip-audit wrote as JSON and as errors.

    The status is 0 if nothing is known, 1 if something is, 2 if nothing was audited.
    """
    try:
        found: list[dict[str, Any]] = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = (errors.strip().splitlines() or ["no message"])[-1]
        return NOT_AUDITED, [f"NOT AUDITED: the advisory service could not be reached ({last[:200]})"]
    skipped = [row["name"] for row in found if "skip_reason" in row]
    audited = [row for row in found if "skip_reason" not in row]
    if not audited:
        return NOT_AUDITED, [
            f"NOT AUDITED: the advisory service that was reached knows none of {len(skipped)} packages; a mirror of packages alone "
            "has no advisories"
        ]
    lines = [
        f"{row['name']} {row['version']}: {one['id']}, fixed in {', '.join(one['fix_versions']) or 'no version'}"
        for row in audited
        for one in row["vulns"]
    ]
    lines += [f"not audited, unknown to the service: {', '.join(skipped)}"] if skipped else []
    vulnerable = sum(bool(row["vulns"]) for row in audited)
    return min(vulnerable, 1), [
        *lines,
        f"{len(audited)} packages audited, {vulnerable} with known vulnerabilities",
    ]


def main(pip_audit: str, folder: Path) -> int:
    command = [sys.executable, "-m", "pip", "list", "--format", "freeze", "--exclude-editable"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    pinned = folder / "requirements.txt"
    pinned.write_text("\n".join(requirements(listed)) + "\n")
    asked = [pip_audit, "--requirement", str(pinned), "--no-deps", "--disable-pip", "--format", "json"]
    done = subprocess.run(
        [*asked, "--progress-spinner", "off", "--timeout", "30"], capture_output=True, text=True
    )
    status, lines = verdict(done.stdout, done.stderr)
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
