"""Run many forwards of one model side by side, which wait at each linear until all have reached it.

Each batch runs the host's own forward in its own thread, one of them at a time. At a linear it passes its input and waits. So
the linear gets the inputs of all batches at once, and decides its computation from then on. A waiting forward holds only the
activations that it still needs; nothing is computed twice, and no knowledge of the model is needed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor, nn

Compute = Callable[[Tensor], Tensor]
# (module, {number of the batch: input}) -> the forward from then on, or None for the one before.
Visit = Callable[[nn.Module, dict[int, Tensor]], Compute | None]


def walk(calls: Sequence[Callable[[], Any]], modules: Sequence[nn.Module], visit: Visit) -> None:
    """Run `calls`, forwards of one model, with a stop at the first call of each of `modules`; all end after the last of these.

    The model is unchanged afterward, even after an error. The order is that in which the first call reaches the modules; if
    calls reach different ones, the module with most waiting calls is next.

    Args:
        calls: functions without arguments, one for each batch.
        modules: called with one tensor [..., in_features].

    Raises:
        Exception: an error of a call or of `visit`.
    """
    left = {id(module) for module in modules}
    with ExitStack() as around:
        stand_ins = {id(module): around.enter_context(_stop_ahead(module)) for module in modules}
        batches = []
        for call in calls:
            batches.append(_Batch(call))
            around.callback(batches[-1].end)
        for batch in batches:
            batch.go_on()
        while left and (waiting := [batch for batch in batches if batch.module is not None]):
            module = Counter(batch.module for batch in waiting).most_common(1)[0][0]
            assert module is not None
            here = {number: batch for number, batch in enumerate(batches) if batch.module is module}
            inputs = {number: batch.input for number, batch in here.items()}
            stand_ins[id(module)].meets(visit(module, inputs))
            left.discard(id(module))
            for batch in here.values() if left else ():
                batch.go_on()


class _Ended(BaseException):
    """Ends a forward that is not needed any more."""


class _Batch:
    """A call in a thread, which runs only while `go_on` waits for it.

    Attributes:
        module, input: the module where it waits, and its input; None after the end.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self.module: nn.Module | None = None
        self.input: Any = None
        self._call = call
        self._error: BaseException | None = None
        self._ending = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._run,), name="hf_cpu_accel calibration", daemon=True
        )
        self._thread.start()

    def go_on(self) -> None:
        """Run the call up to its next stop, or its end.

        Raises:
            Exception: an error of the call.
        """
        self.module = self.input = None
        self._go.release()
        self._stopped.acquire()
        if self._error is not None and not self._ending:
            raise self._error

    def end(self) -> None:
        self._ending = True
        if self._thread.is_alive():
            self._go.release()
            self._thread.join()

    def wait_at(self, module: nn.Module, input: Tensor) -> None:
        """Wait at a module; called by the thread of the call."""
        self.module, self.input = module, input
        self._stopped.release()
        self._go.acquire()
        if self._ending:
            raise _Ended

    def _run(self) -> None:
        _current.batch = self
        self._go.acquire()
        try:
            if not self._ending:
                with torch.no_grad():
                    self._call()
        except BaseException as error:  # goes to who waits, in the other thread
            self._error = error
        self._stopped.release()


_current = threading.local()


class _StandIn:
    """The forward of a module during a walk."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._compute: Compute = module.forward
        self._is_met = False

    def meets(self, compute: Compute | None) -> None:
        self._compute, self._is_met = compute or self._compute, True

    def __call__(self, input: Tensor) -> Tensor:
        batch: _Batch | None = getattr(_current, "batch", None)
        if batch is not None and not self._is_met:
            batch.wait_at(self._module, input)
        return self._compute(input)


@contextmanager
def _stop_ahead(module: nn.Module) -> Iterator[_StandIn]:
    stand_in = _StandIn(module)
    before = vars(module).get("forward")
    vars(module)["forward"] = stand_in
    try:
        yield stand_in
    finally:
        if before is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = before
