"""The results on disk: one small JSON file per machine key, shared by all processes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hf_cpu_accel.runtime.private_files import make_folder

FORMAT = 1
# Another process holds the lock for milliseconds. On a file system whose locks hang, give up.
_LOCK_SECONDS, _POLL_SECONDS = 0.2, 0.005


@dataclass(frozen=True)
class Choice:
    """The fastest provider of one op for one range of row counts.

    Attributes:
        provider: `autotune.NATIVE` or the name of a provider.
        seconds: the best measured time of one call, by name.
        rows: the row count that was measured.
    """

    provider: str
    seconds: dict[str, float]
    rows: int

    def to_dict(self) -> dict[str, Any]:
        microseconds = {name: round(value * 1e6, 2) for name, value in self.seconds.items()}
        return {"provider": self.provider, "microseconds": microseconds, "rows": self.rows}

    @classmethod
    def from_dict(cls, fields: Any) -> Choice:
        """Return the choice of the fields from `to_dict`.

        Raises:
            ValueError: the fields are not valid.
        """
        try:
            seconds = {str(name): float(value) / 1e6 for name, value in fields["microseconds"].items()}
            choice = cls(fields["provider"], seconds, int(fields["rows"]))
        except (AttributeError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"not a valid choice: {fields!r}") from error
        if choice.provider not in seconds or not all(0 < t < math.inf for t in seconds.values()):
            raise ValueError(f"not a valid choice: {fields!r}")
        return choice


class Store:
    """The choices of one machine key in `folder`, as {key of the work: Choice}.

    A file that is damaged, or of another format or machine, is ignored with one warning and replaced by the next `add`. If the
    folder cannot be written, `add` stores nothing, and `problem` has the reason.
    """

    def __init__(self, folder: Path, machine: dict[str, Any]) -> None:
        self.machine = machine
        name = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder / f"{name}.json"
        self.problem: str | None = None
        self._warned = False

    def load(self) -> dict[str, Choice]:
        """Return the choices on disk; empty if there is no valid file."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            self._warn(error)
            return {}
        try:
            fields = json.loads(text)
            if not isinstance(fields, dict) or (fields.get("format"), fields.get("machine")) != (
                FORMAT,
                self.machine,
            ):
                raise ValueError(f"it is not of format {FORMAT}, or of another machine")
            return {str(key): Choice.from_dict(choice) for key, choice in fields["choices"].items()}
        except (AttributeError, KeyError, ValueError, RecursionError) as error:
            self._warn(error)
            return {}

    def add(self, choices: dict[str, Choice]) -> dict[str, Choice]:
        """Add `choices` to those on disk, in one atomic replacement of the file.

        Returns:
            All choices. If another process has stored a choice first, that one stays, so that all processes agree.
        """
        try:
            make_folder(self.path.parent)
            with FileLock(self.path.with_suffix(".lock"), timeout=_LOCK_SECONDS, poll_interval=_POLL_SECONDS):
                merged = choices | self.load()
                self._replace(merged)
        except (
            OSError,
            NotImplementedError,
            Timeout,
        ) as error:  # NotImplementedError: no locks on this file system
            self.problem = str(error)
            return choices
        self.problem = None
        return merged

    def _replace(self, choices: dict[str, Choice]) -> None:
        fields = {
            "format": FORMAT,
            "machine": self.machine,
            "choices": {key: choice.to_dict() for key, choice in sorted(choices.items())},
        }
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(fields, file, indent=1)
            os.replace(name, self.path)
        except BaseException:
            os.unlink(name)
            raise

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the measurements in {self.path} are ignored and will be repeated: {error}", stacklevel=3
            )
