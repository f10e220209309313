"""Text generation by a rival, in a separate process and environment; see benchmarks/protocol.py."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

from benchmarks import protocol


def prepare(module: str, system: str, case: str, prompt: str, new: str, threads: str) -> protocol.Writer:
    """Generate once with `system` of benchmarks.peers.`module` and the model of `case`.

    Such a module has `convert(system, case)`, whose result is kept on disk and whose time does not count, and
    `load(system, converted, prompt, new, threads)`, which returns a callable that writes one text (the seconds to its first
    token, and of each token after it) and facts: the dtype among this package's that is nearest, and the bytes of weights that a
    token reads.
    """
    backend = importlib.import_module(f"benchmarks.peers.{module}")
    model = backend.convert(system, Path(case))
    start = time.perf_counter()
    write, facts = backend.load(system, model, int(prompt), int(new), int(threads))
    write()
    facts |= {"threads": int(threads), "first_result_seconds": time.perf_counter() - start}
    return protocol.Writer(write, facts)


if __name__ == "__main__":
    protocol.serve(lambda: prepare(*sys.argv[1:]))
