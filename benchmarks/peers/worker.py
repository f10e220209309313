"""A rival in a separate process and environment: prepares, then runs bursts; see benchmarks/protocol.py."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks import protocol
from benchmarks.peers.conversion import inputs


def prepare(module: str, system: str, folder: str, threads: str) -> protocol.Prepared:
    """Run `system` of benchmarks.peers.`module` once on the case in `folder`.

    Such a module has `convert(system, case)`, whose result is kept on disk and whose time does not count, and
    `load(system, converted, inputs, threads)`, which returns one forward pass and what makes an array of its result.
    """
    backend, case = importlib.import_module(f"benchmarks.peers.{module}"), Path(folder)
    model = backend.convert(system, case)
    start = time.perf_counter()
    call, as_array = backend.load(system, model, inputs(case), int(threads))
    result = call()
    first_result = time.perf_counter() - start
    output = np.array(as_array(result), dtype=np.float32)  # a copy: some hand out views of their buffers
    return protocol.Prepared(call, [output], {"threads": int(threads), "first_result_seconds": first_result})


if __name__ == "__main__":
    protocol.serve(lambda: prepare(*sys.argv[1:]))
