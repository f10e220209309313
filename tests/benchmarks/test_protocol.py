"""The worker's side of the protocol, in an interpreter that has numpy and the standard library only."""

import json
import sys
from pathlib import Path

import numpy as np

from tests.children import run_child

_ROOT = Path(__file__).resolve().parents[2]
# What a rival's environment lacks must not be needed, and a library that prints must not break the protocol.
_WORKER = """
import sys
for absent in ("hf_cpu_accel", "torch", "transformers", "rich", "typer"):
    sys.modules[absent] = None
import numpy as np
from benchmarks import protocol
def prepare():
    print("chatter")
    if len(sys.argv) > 1 and sys.argv[1] == "fail":
        raise ValueError("no such instruction")
    if len(sys.argv) > 1 and sys.argv[1] == "write":
        return protocol.Writer(lambda: (0.5, (0.25, 0.125)), {"threads": 2})
    return protocol.Prepared(lambda: print("more"), [np.arange(3.0)], {"threads": 2})
protocol.serve(prepare)
"""


def talk(requests: list[dict[str, object]], *arguments: str) -> tuple[list[dict[str, object]], str]:
    given = "".join(json.dumps(request) + "\n" for request in requests)
    done = run_child([sys.executable, "-c", _WORKER, *arguments], cwd=_ROOT, input=given)
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_a_worker_tells_its_facts_and_serves(tmp_path: Path) -> None:
    path = str(tmp_path / "out.npz")
    answers, chatter = talk(
        [
            {"do": "burst", "calls": 3, "seconds": 0.0},
            {"do": "output", "path": path},
            {"do": "quit"},
            {"do": "burst", "calls": 1, "seconds": 0.0},
        ]
    )
    ready, burst, saved = answers
    assert ready == {"ready": {"threads": 2}}
    assert isinstance(burst["times"], list)
    assert len(burst["times"]) == 3
    assert saved == {"saved": path}
    with np.load(path) as arrays:
        assert arrays["arr_0"].tolist() == [0.0, 1.0, 2.0]
    assert chatter.count("more") == 4  # one call goes ahead of the burst, unrecorded


def test_a_worker_that_writes_tells_the_time_of_every_token() -> None:
    answers, _ = talk([{"do": "generate"}, {"do": "generate"}, {"do": "quit"}], "write")
    assert answers == [{"ready": {"threads": 2}}, *[{"first": 0.5, "steps": [0.25, 0.125]}] * 2]


def test_a_worker_that_cannot_prepare_says_why() -> None:
    answers, trace = talk([{"do": "burst", "calls": 1, "seconds": 0.0}], "fail")
    assert answers == [{"error": "ValueError: no such instruction"}]
    assert "Traceback" in trace


def test_workers_of_rivals_import_without_the_package() -> None:
    modules = ["worker", "conversion", "openvino", "onnxruntime"]
    modules += ["generation_worker", "openvino_generation", "llamacpp", "build_llamacpp"]
    code = "import sys; sys.modules['hf_cpu_accel'] = sys.modules['torch'] = None\n"
    code += "".join(f"import benchmarks.peers.{name}\n" for name in modules)
    run_child([sys.executable, "-c", code], cwd=_ROOT, check=True)
