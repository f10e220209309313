"""`InstancePool`: several pinned instances of one model that share its packed weights."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from hf_cpu_accel.hosts.find import find
from hf_cpu_accel.serve.instances import inside, placement
from hf_cpu_accel.serve.instances.fork_server import ForkServer
from hf_cpu_accel.serve.instances.jobs import Job, Jobs
from hf_cpu_accel.serve.instances.placement import Limits, Placement
from hf_cpu_accel.serve.instances.process_instance import ProcessInstance, serve
from hf_cpu_accel.serve.instances.results import Results
from hf_cpu_accel.serve.instances.settings import Setting, table
from hf_cpu_accel.serve.instances.thread_instance import ThreadInstance
from hf_cpu_accel.serve.instances.work import One, Request, Work
from hf_cpu_accel.serve.instances.worker import Instance, Worker

if TYPE_CHECKING:
    from rich.table import Table

KINDS = ("auto", "thread", "process")
_CHECK_INTERVAL = 1.0  # seconds between two checks of affinity and quota
_AHEAD = 4  # calls per instance that `map` submits ahead, and that may wait in the queue


class InstancePool:
    """Run several instances of a model in parallel, each pinned to its own cores, on the same weights.

        pool = InstancePool(accelerate_for_cpu(encoder), instances=2)
        vectors = list(pool.map(texts, batch_size=32, progress=True))

    The pool checks the affinity and the container quota every second. If they change, it moves the instances and limits how many
    compute at the same time.

    Args:
        model: an accelerated `Pipeline`, `SentenceTransformer`, `CrossEncoder`, `nn.Module` or another callable.
        instances: number of instances; None to choose for the machine.
        threads: number of threads per instance; None to choose for the machine.
        kind: `"thread"` for models that spend their time in kernels, which release the GIL. `"process"` for models that spend it in
            Python: processes are forked and share the weights, and a killed process is replaced. `"auto"` uses processes for models
            that generate text.
        call: `call(model, ...)` replaces the default call of the model; see `work.Work`.
        pin: pin instances to cores. With False all instances compute at the same time, for calls that wait for other resources.
        waiting: maximum number of calls that wait for an instance; `submit` blocks for more.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a value that is not accepted.
    """

    def __init__(
        self,
        model: Any,
        instances: int | None = None,
        threads: int | None = None,
        *,
        kind: str = "auto",
        call: Callable[..., Any] | None = None,
        pin: bool = True,
        waiting: int | None = None,
    ) -> None:
        if not callable(model) and call is None:
            raise TypeError(f"model is a {type(model).__name__}, which is not callable: pass call=")
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}: accepted are {', '.join(map(repr, KINDS))}")
        if waiting is not None and (not isinstance(waiting, int) or waiting < 1):
            raise ValueError(f"waiting={waiting!r}: expected a whole number from 1, or None")
        self.kind = ("process" if _generates(model) else "thread") if kind == "auto" else kind
        self._pin = pin
        self._limits = placement.limits()
        self._placement = placement.place(self._limits, instances, threads)
        count = len(self._placement.places)
        self._asked = count, threads
        self._work = Work(model, call)
        self._jobs = Jobs(waiting or _AHEAD * count, self._active)
        self._variables = inside.Variables()
        self._fork_server = ForkServer(partial(serve, self._work)) if self.kind == "process" else None
        self._workers = [
            Worker(number, self._jobs, self._instance(), place, pin)
            for number, place in enumerate(self._placement.places)
        ]
        self._over = threading.Event()
        for worker in self._workers:
            worker.start()
        for worker in self._workers:
            worker.ready.wait()
        watch = partial(_watch, weakref.ref(self), self._over)
        threading.Thread(target=watch, name="InstancePool-limits", daemon=True).start()

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the model in the next free instance; wait while the queue is full.

        Args:
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.

        Returns:
            The future of the result.

        Raises:
            RuntimeError: the pool is closed.
        """
        return self._put(One(args, kwargs))

    def map(
        self,
        items: Iterable[Any],
        batch_size: int | None = None,
        *,
        progress: bool = False,
        return_exceptions: bool = False,
    ) -> Results:
        """Yield the results of all items, in their order. The iterable may be endless; items are read as results are consumed.

        `next()` raises the exception of an item at its position, and the following `next()` continues with the next item (a `for`
        loop ends there). If a batch fails, its items run one by one.

        Args:
            items: the inputs of the model; for a module also mappings or tuples of its arguments.
            batch_size: number of items per call; None for one call per item. Pipelines, encoders and `call` get a list. For
                modules, tensors are stacked, and outputs are split along their first dimension.
            progress: show a progress bar.
            return_exceptions: yield exceptions instead of raising them.

        Raises:
            ValueError: a batch_size below 1.
            TypeError: items that are not iterable.
            RuntimeError: the pool is closed.
        """
        if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
            raise ValueError(f"batch_size={batch_size!r}: expected a whole number from 1, or None")
        if self._jobs.closed:
            raise RuntimeError("this InstancePool is closed: create another one")
        return Results(
            items,
            submit=self._put,
            one=self._work.one,
            batch_size=batch_size,
            ahead=_AHEAD * len(self._workers),
            return_exceptions=return_exceptions,
            progress=progress,
        )

    @property
    def placement(self) -> Placement:
        """Return the current places of the instances, and the reason."""
        return self._placement

    @property
    def pids(self) -> tuple[int | None, ...]:
        """Return the process ids of the instances; None for a thread and for a process that will be replaced."""
        return tuple(worker.instance.pid for worker in self._workers)

    def settings(self) -> list[Setting]:
        """Return the settings of the pool, with hints for settings that only `hf-cpu-accel launch` can change."""
        return inside.settings(self._placement, self.kind, self._pin, self._variables)

    def close(self, *, cancel: bool = False) -> None:
        """Accept no more calls, finish the submitted ones, and stop the instances; with `cancel`, cancel the waiting ones."""
        self._jobs.close(cancel)
        self._over.set()
        for worker in self._workers:
            worker.join()
        if self._fork_server is not None:
            self._fork_server.close()
        self._variables.restore()

    def __enter__(self) -> InstancePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the pool; after an exception, cancel waiting calls."""
        self.close(cancel=error is not None)

    def __rich__(self) -> Table:
        return table(self.settings())

    def _put(self, request: Request) -> Future[Any]:
        job = Job(request)
        self._jobs.put(job)
        return job.future

    def _instance(self) -> Instance:
        if self._fork_server is not None:
            return ProcessInstance(self._fork_server)
        return ThreadInstance(self._work, torch.get_num_threads())

    @property
    def _active(self) -> int:
        return self._placement.active if self._pin else len(self._placement.places)

    def __del__(self) -> None:
        if hasattr(self, "_over"):
            self._jobs.close(cancel=True)
            self._over.set()

    def _follow(self, limits: Limits) -> None:
        """Move the instances if the limits have changed."""
        if limits == self._limits or not limits.cpus:
            return
        self._limits, self._placement = limits, placement.place(limits, *self._asked)
        for worker, place in zip(self._workers, self._placement.places, strict=True):
            worker.target = place
        self._jobs.set_active(self._active)


def _watch(pool: weakref.ref[InstancePool], over: threading.Event) -> None:
    """Check the limits every second until the pool is closed or garbage."""
    while not over.wait(_CHECK_INTERVAL):
        strong = pool()
        if strong is None:
            return
        strong._follow(placement.limits())
        del strong


def _generates(model: Any) -> bool:
    try:
        roots = find(model)
    except TypeError:  # another callable
        return False
    return any(callable(ask := getattr(root.module, "can_generate", None)) and ask() for root in roots)
