"""`InstancePool`: one model, several pinned instances of it on one set of packed weights."""

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
_LOOK = 1.0  # seconds between two looks at affinity and quota
_AHEAD = 4  # calls for each instance that `map` has on their way, and that may wait in the queue


class InstancePool:
    """Several instances of a model that compute at once, each pinned to cores of its own, all on the same weights.

        pool = InstancePool(accelerate_for_cpu(encoder), instances=2)
        vectors = list(pool.map(texts, batch_size=32, progress=True))

    Affinity and the quota of the container are looked at every second: if they change, instances move, and no more of them
    compute at a time than there are CPUs for.

    Args:
        model: a `Pipeline`, `SentenceTransformer`, `CrossEncoder`, `nn.Module`, or anything that can be called; accelerated before.
        instances, threads: how many, and of how many threads each; None for what the machine has room for (`placement.place`).
        kind: `"thread"`, where kernels take the time: they release the interpreter's lock. `"process"`, where Python does: they
            are forked and share the weights' pages, and one that is killed is replaced. `"auto"`: processes for models that
            generate text.
        call: `call(model, ...)` instead of the usual call of the model; see `work.Work`.
        pin: False: no CPUs are reserved, and all instances compute at once, for calls that wait for something else.
        waiting: calls that may wait for an instance; `submit` blocks while there are so many.

    Raises:
        TypeError, ValueError: an argument that is not accepted.
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
            raise TypeError(f"model is a {type(model).__name__}, which cannot be called: pass call=")
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}: accepted are {', '.join(map(repr, KINDS))}")
        if waiting is not None and (not isinstance(waiting, int) or waiting < 1):
            raise ValueError(f"waiting={waiting!r}: accepted are whole numbers from 1, or None")
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
        """Call the model in the next free instance; waits while the queue is full.

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
        """Results in the order of the items, which are drawn as results are taken: the iterable may be endless.

        An item's exception is its own: `next()` raises it in the place of its result, and goes on behind it when it is called again
        (a `for` loop ends there). Where a batch fails, its items are tried one by one.

        Args:
            items: what the model is called with; of a module also mappings of its arguments, or tuples of them.
            batch_size: None: a call for each item. Else so many items are one call: a list for pipelines, encoders and `call`;
                for modules tensors are stacked, and outputs are split along their first dimension.
            progress: show a bar.
            return_exceptions: exceptions are given in the place of results, instead of raised.

        Raises:
            ValueError: a batch_size below 1. TypeError: nothing to iterate over. RuntimeError: the pool is closed.
        """
        if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
            raise ValueError(f"batch_size={batch_size!r}: accepted are whole numbers from 1, or None")
        if self._jobs.closed:
            raise RuntimeError("this InstancePool is closed: make another one")
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
        """Where the instances are at the moment, and why."""
        return self._placement

    @property
    def pids(self) -> tuple[int | None, ...]:
        """The processes of the instances: None for threads, and for one that is about to be replaced."""
        return tuple(worker.instance.pid for worker in self._workers)

    def settings(self) -> list[Setting]:
        """What was set, and what only `hf-cpu-accel launch` could."""
        return inside.settings(self._placement, self.kind, self._pin, self._variables)

    def close(self, *, cancel: bool = False) -> None:
        """Take no more, finish what was asked for, and end the instances; with `cancel`, what waits is not begun."""
        self._jobs.close(cancel)
        self._over.set()
        for worker in self._workers:
            worker.join()
        if self._fork_server is not None:
            self._fork_server.close()
        self._variables.put_back()

    def __enter__(self) -> InstancePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Whoever leaves by an exception does not wait for what was not begun."""
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
        """Move where the limits have changed."""
        if limits == self._limits or not limits.cpus:
            return
        self._limits, self._placement = limits, placement.place(limits, *self._asked)
        for worker, place in zip(self._workers, self._placement.places, strict=True):
            worker.wanted = place
        self._jobs.set_active(self._active)


def _watch(pool: weakref.ref[InstancePool], over: threading.Event) -> None:
    """Until the pool is closed, or not referred to any more."""
    while not over.wait(_LOOK):
        held = pool()
        if held is None:
            return
        held._follow(placement.limits())
        del held


def _generates(model: Any) -> bool:
    try:
        roots = find(model)
    except TypeError:  # something else that can be called
        return False
    return any(callable(ask := getattr(root.module, "can_generate", None)) and ask() for root in roots)
