"""Compare the plans of all models with the golden files in tests/plans/golden/: `make plans TYPES="bert roberta"`.

    python -m tests.plans [--update] [--shards 2] [NAME...]

Each model is accelerated and called as in tests/architectures/sweep.py. The rows of `explain()` are then compared with the
golden files. Changed rows are printed as a unified diff, and the exit status is 1. With `--update`, the files are rewritten.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.plans import golden
from tests.plans.subjects import GROUPS, Inspection, group_of, names
from tests.shards import ROOT, Job, Line

FOLDER = golden.FOLDER
FILE = ROOT / "build" / "plans.jsonl"
# No row may depend on the machine: the ops of this package alone, without measuring, in a tier that all x86 CPUs of today have.
# And time enough to find a call while the machine is busy.
ENVIRONMENT = {
    "HF_CPU_ACCEL_PROVIDERS": "own",
    "HF_CPU_ACCEL_ISA": "avx2" if platform.machine() in ("x86_64", "AMD64") else "generic",
    "ARCHITECTURES_SECONDS": "60",
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    groups = sorted({group_of(name) for name in options.names} or GROUPS, key=GROUPS.index)
    known = {group: names(group) for group in groups}
    unknown = set(options.names).difference(*known.values())
    if unknown:
        print(f"{', '.join(sorted(unknown))}: unknown; see tests/plans/subjects.py", file=sys.stderr)
        return 2
    wanted = {
        group: [name for name in known[group] if not options.names or name in options.names]
        for group in groups
    }
    found = inspections([name for group in groups for name in wanted[group]], FILE, options.shards)
    blocks = {name: golden.block(name, one) for name, one in found.items()}
    changed = [name for group in groups for name in _compare(group, wanted[group], blocks, options)]
    print(f"{len(changed)} of {len(blocks)} models have other rows{': ' * bool(changed)}{', '.join(changed)}")
    return int(bool(changed) and not options.update)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="these models and no others")
    parser.add_argument("--update", action="store_true", help="rewrite the golden files")
    parser.add_argument("--shards", type=int, default=2, help="child processes at a time")
    return parser


def inspections(wanted: list[str], file: Path, shards: int = 2) -> dict[str, Inspection]:
    """Return {name: what `subjects.inspect` returns}, from child processes that write to `file`."""
    file.unlink(missing_ok=True)
    job = Job("tests.plans.subjects:inspect", file, environment=ENVIRONMENT)
    job.run(wanted, shards)
    lines = job.lines()
    return {name: lines[name].get("result") or _failure(lines[name]) for name in wanted}


def _failure(line: Line) -> Inspection:
    """Return the inspection of a model that ended its process, or raised where it was built."""
    return {"title": f"not run, {line['error'].partition(':')[0]}", "rows": {}, "errors": {}}


def _compare(group: str, wanted: list[str], blocks: golden.Blocks, options: argparse.Namespace) -> list[str]:
    """Print the changes of a golden file, and return the names of the models with other rows."""
    versions, before = golden.read(group, FOLDER)
    if versions not in ("", golden.versions()):
        print(f"{group}: the golden file is of {versions}; installed: {golden.versions()}", file=sys.stderr)
    after = {name: blocks[name] for name in wanted}
    old = before if not options.names else {name: before[name] for name in wanted if name in before}
    changed = []
    for name in sorted({*old, *after}):
        difference = golden.difference(name, old.get(name), after.get(name))
        if difference:
            changed.append(name)
            print("\n".join(difference), end="\n\n")
    if options.update:
        golden.write(group, {**before, **after} if options.names else after, FOLDER)
    return changed


if __name__ == "__main__":
    sys.exit(main())
