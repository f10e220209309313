"""Where the commands of this folder keep what they measured last, for `benchmarks.scaling.cost` and its README.md."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hf_cpu_accel.measure import environment

FILE = Path(__file__).with_name("measured.json")
_OTHERS = 1  # of the load, what may be other work than the measurement's, which keeps all cores busy itself


def record(name: str, values: dict[str, float], file: Path = FILE) -> None:
    """Record `values` under `name`, with the machine and its load average over five minutes."""
    kept = read(file)
    facts = environment.environment()
    machine = {key: facts[key] for key in ("cpu", "cores", "tier") if key in facts}
    kept[name] = {
        "machine": machine,
        "load": round(os.getloadavg()[1], 1),
        **{key: round(value, 4) for key, value in values.items()},
    }
    file.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read(file: Path = FILE) -> dict[str, dict[str, Any]]:
    """Return all recorded values."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def split(measured: dict[str, dict[str, Any]]) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Split into values measured on an idle machine, and values measured beside other work, whose times are unreliable."""
    busy = {
        name for name, values in measured.items() if values["load"] > values["machine"]["cores"] + _OTHERS
    }
    return (
        {name: values for name, values in measured.items() if name not in busy},
        {name: values for name, values in measured.items() if name in busy},
    )
