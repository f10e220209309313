"""`make test-architectures`: every model type of transformers, built small from its own config, run as it is and accelerated.

    python -m tests.architectures.sweep [--resume] [--only TYPE...] [--dtypes DTYPE...] [--shards 2] [--page]

The types run in child processes (`tests/shards.py`). Results go to build/architectures.json line by line; with --resume, types
that are there already are not run again. The exit status is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from tests.architectures.check import DTYPES
from tests.architectures.page import summary, write_page
from tests.shards import ROOT, Job, Line

RESULTS = ROOT / "build" / "architectures.json"
_CHECK = "tests.architectures.check:check"

Result = dict[str, Any]

_UNREACHED: Result = {"status": "not run", "reason": "not reached yet: --resume goes on", "problems": []}


def main() -> int:
    options = _options()
    if not options.resume and not options.page:
        RESULTS.unlink(missing_ok=True)
    # Those with a model of their own first: parts of others are harder to call.
    types = options.only or sorted(CONFIG_MAPPING, key=lambda name: (name not in MODEL_MAPPING_NAMES, name))
    known = {} if options.only else results()
    if not options.page:
        own = {"HF_CPU_ACCEL_PROVIDERS": os.environ.get("HF_CPU_ACCEL_PROVIDERS", "own")}
        job = Job(_CHECK, RESULTS, [options.dtypes], own)
        job.run([name for name in types if name not in known], options.shards)
    found = [result for name, result in sorted(results().items()) if name in types]
    if options.page:
        found += [_UNREACHED | {"type": name} for name in types if name not in known]
        found.sort(key=lambda result: result["type"])
        write_page(found, ROOT / "docs" / "reference" / "models.md")
    print(summary(found))
    return int(any(result["status"] in ("wrong", "not explained") for result in found))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--resume", action="store_true", help="keep the results that are there")
    parser.add_argument("--only", nargs="*", help="these types and no others")
    parser.add_argument("--dtypes", nargs="*", default=DTYPES, choices=DTYPES, help="these and no others")
    parser.add_argument("--shards", type=int, default=2, help="child processes at a time")
    parser.add_argument(
        "--page", action="store_true", help="run nothing, write docs/reference/models.md from the results"
    )
    return parser.parse_args()


def results(file: Path = RESULTS) -> dict[str, Result]:
    """Return {type: its last result}."""
    return {name: _result(name, line) for name, line in Job(_CHECK, file).lines().items()}


def _result(model_type: str, line: Line) -> Result:
    if "error" in line:
        return {"type": model_type, "status": "wrong", "problems": [line["error"]]}
    result: Result = line["result"]
    return result


if __name__ == "__main__":
    sys.exit(main())
