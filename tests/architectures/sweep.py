"""`make test-architectures`: every model type of transformers, built small from its own config, run as it is and accelerated.

    python -m tests.architectures.sweep [--resume] [--only TYPE...] [--dtypes DTYPE...] [--shards 2] [--page]

Each batch of types runs in a child process; what ends it (a crash, too much memory or time) is noted for the type at hand, and
another child goes on. Results go to build/architectures.json line by line; with --resume, types that are there already are not run
again. The exit status is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from tqdm import tqdm
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from tests.architectures.check import DTYPES
from tests.architectures.child import SECONDS
from tests.architectures.page import summary, write_page
from tests.children import run_child

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "architectures.json"
_BATCH = 40

Result = dict[str, Any]

_UNREACHED: Result = {"status": "not run", "reason": "not reached yet: --resume goes on", "problems": []}


def main() -> int:
    options = _options()
    RESULTS.parent.mkdir(exist_ok=True)
    if not options.resume and not options.page:
        RESULTS.unlink(missing_ok=True)
    # Those with a model of their own first: parts of others are harder to call.
    types = options.only or sorted(CONFIG_MAPPING, key=lambda name: (name not in MODEL_MAPPING_NAMES, name))
    known = {} if options.only else results()
    _run([t for t in types if t not in known], 0 if options.page else options.shards, options.dtypes)
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
    """{type: the last result}; a line that a crash has cut short counts as none."""
    found: dict[str, Result] = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "type" in value:
            found[value["type"]] = value
    return found


def _run(types: list[str], shards: int, dtypes: Sequence[str]) -> None:
    if not types or not shards:
        return
    waiting: SimpleQueue[list[str]] = SimpleQueue()
    for first in range(0, len(types), _BATCH):
        waiting.put(types[first : first + _BATCH])
    with tqdm(total=len(types), disable=None) as bar, ThreadPoolExecutor(shards) as pool:
        for done in [pool.submit(_shard, waiting, shard, dtypes, bar) for shard in range(shards)]:
            done.result()


def _shard(waiting: SimpleQueue[list[str]], shard: int, dtypes: Sequence[str], bar: tqdm) -> None:
    while True:
        try:
            batch = waiting.get_nowait()
        except Empty:
            return
        while batch:
            batch = _rest(batch, RESULTS.with_suffix(f".{shard}.part"), dtypes)
            bar.n = len(results())
            bar.refresh()


def _rest(batch: list[str], part: Path, dtypes: Sequence[str] = DTYPES) -> list[str]:
    """Run a child on `batch` in these dtypes; those that are left when it ends."""
    part.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.architectures.child", str(part), ",".join(dtypes), *batch]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    done = run_child(command, cpu_seconds=(SECONDS + 5) * len(batch), cwd=ROOT, env=environment)
    lines = part.read_text().splitlines() if part.exists() else []
    started = [value["started"] for value in map(json.loads, lines) if "started" in value]
    finished = [value["type"] for value in map(json.loads, lines) if "type" in value]
    if done.returncode:
        # Before the first type it is not the type's fault: nothing would ever get further.
        if not started:
            raise RuntimeError(f"the child process fails: {done.stderr[-2000:]}")
        last = started[-1]
        if last not in finished:
            told = f"the process ended with {done.returncode}: {done.stderr[-300:].strip()}"
            lines.append(json.dumps({"type": last, "status": "wrong", "problems": [told]}))
            finished.append(last)
    with RESULTS.open("a") as all_results:
        all_results.writelines(f"{line}\n" for line in lines if '"type"' in line)
    part.unlink(missing_ok=True)
    return [name for name in batch if name not in finished]


if __name__ == "__main__":
    sys.exit(main())
