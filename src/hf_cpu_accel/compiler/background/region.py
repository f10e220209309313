"""Blocks of the same structure, which share one compiled form for each form of call."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from hf_cpu_accel.compiler import report
from hf_cpu_accel.compiler.background import artifacts, jobs
from hf_cpu_accel.compiler.background.bound import BoundBlock, Library
from hf_cpu_accel.compiler.background.calls import Key
from hf_cpu_accel.compiler.background.toolchain import why_off
from hf_cpu_accel.compiler.background.verdict import Verdict
from hf_cpu_accel.compiler.background.worker import Job
from hf_cpu_accel.runtime.fork import new_lock

logger = logging.getLogger("hf_cpu_accel.compiler")

MAX_FORMS = 4  # forms of calls of one region
MAX_LIBRARIES = 4  # for blocks of the same structure with other values of attributes
EVERY = 4  # one call in this many runs both forms until the faster one is known


@dataclass
class Form:
    """One form of call of a region.

    Attributes:
        state: "compiling", "compiled" or "left".
        reason: why the form was left; of "compiled", why some blocks were left.
        libraries: the libraries that were compiled or loaded.
        cached: the number of libraries loaded from disk.
        cpu_seconds: the CPU time of compiling.
        verdicts: {bit length of the number of elements of the largest input: Verdict}.
        calls: the number of calls of this form.
    """

    state: str = "compiling"
    reason: str | None = None
    libraries: list[Library] = field(default_factory=list)
    cached: int = 0
    cpu_seconds: float = 0.0
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    calls: int = 0

    def leave(self, reason: str) -> None:
        """Run level 1 for calls of this form from now on."""
        self.reason, self.state = reason, "left"

    def verdict(self, size: int) -> Verdict:
        return self.verdicts.setdefault(size.bit_length(), Verdict())


class Block(Protocol):
    """The replacement of a block's forward, see `forward.BlockForward`."""

    block: nn.Module

    def offer(self, key: Key, form: Form, bound: BoundBlock) -> None: ...


class Region:
    """Attributes:
    name: the path of its blocks, `*` for the index.
    blocks: the replaced forwards of its blocks.
    mode: "background" or "now".
    dtype: the dtype of packed weights.
    bundle: another folder to load artifacts from, or None.
    forms: {key of a call: its Form}.
    other_calls: why some calls cannot be compiled, or None.
    closed: whether the model was restored.
    """

    def __init__(self, name: str, mode: str, dtype: str, bundle: Path | None = None) -> None:
        self.name, self.mode, self.dtype, self.bundle = name, mode, dtype, bundle
        self.blocks: list[Block] = []
        self.forms: dict[Key, Form] = {}
        self.other_calls: str | None = None
        self.closed = False
        self._lock = new_lock()

    def request(self, block: Block, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile for calls with that key, in the background unless the mode is "now"."""
        with self._lock:
            if key in self.forms:
                return
            if len(self.forms) >= MAX_FORMS:
                self.other_calls = f"it was called in more than {MAX_FORMS} ways"
                return
            form = self.forms[key] = Form()
        if self.mode == "now":
            self._try_compile(form, block, key, args, kwargs)
        else:
            jobs.submit(lambda: self._try_compile(form, block, key, args, kwargs))

    def turn(self, form: Form) -> bool:
        """Return whether this call runs both forms."""
        form.calls += 1
        return self.mode == "now" or form.calls % EVERY == 1

    def gains(self) -> bool:
        """Return whether a compiled form is faster for inputs of some size."""
        return any(verdict.faster for form in self.forms.values() for verdict in list(form.verdicts.values()))

    def _try_compile(
        self, form: Form, block: Block, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        try:
            self._compile(form, block, key, args, kwargs)
        except Exception as error:  # an error must neither end the thread nor reach the user's call
            logger.debug("hf_cpu_accel: %s", self.name, exc_info=True)
            form.leave(f"{type(error).__name__}: {error}")

    def _compile(
        self, form: Form, first: Block, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        waiting = [first, *(block for block in self.blocks if block is not first)]
        while waiting and len(form.libraries) < MAX_LIBRARIES and not self.closed:
            library = artifacts.find_artifact(waiting[0].block, key, self.bundle)
            if library is not None:
                form.cached += 1
            else:
                library = self._compile_library(form, waiting[0], key, args, kwargs)
            if library is None:
                return
            form.libraries.append(library)
            fitting = [block for block in waiting if library.fits(block.block)]
            if waiting[0] not in fitting:
                form.leave(f"its attribute {library.misfit(waiting[0].block)} changes from call to call")
                return
            for block in fitting:
                block.offer(key, form, BoundBlock(library, block.block))
            waiting = [block for block in waiting if block not in fitting]
        if waiting:
            form.reason = f"{len(waiting)} of {len(self.blocks)} blocks differ from the compiled ones"
        form.state = "compiled"

    def _compile_library(
        self, form: Form, block: Block, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Library | None:
        problem = _problem(block, self.mode)
        if problem is not None:
            form.leave(problem)
            return None
        into = artifacts.folder_of(block.block, key)
        job = Job(block.block, args, kwargs, threads=key[-1], into=into)
        kind, text, seconds = (jobs.compile_here if self.mode == "now" else jobs.compile_in_child)(job)
        form.cpu_seconds += seconds
        if kind == "failed":
            form.leave(text)
            return None
        library = artifacts.load(Path(text))
        if library is None:
            form.leave("the compiled library could not be loaded")
        return library


def _problem(block: Block, mode: str) -> str | None:
    """Return why compiling cannot work, as far as that is known in advance; None otherwise."""
    if off := why_off():
        report.say(f"{off}; compile={mode!r} has no effect, level 1 runs")
        return off
    in_main = next((type(m) for m in block.block.modules() if type(m).__module__ == "__main__"), None)
    if in_main is not None and mode == "background":
        return (
            f"{in_main.__name__} is defined in __main__ and cannot be sent to another process; "
            'move it to a module, or use compile="now"'
        )
    return None
