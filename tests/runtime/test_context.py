"""A context variable has another value inside, and what it had again behind it, whatever happens."""

from contextvars import ContextVar
from threading import Thread

import pytest

from hf_cpu_accel.runtime.context import within

NUMBER: ContextVar[int] = ContextVar("number", default=0)


def test_values_are_nested() -> None:
    with within(NUMBER, 1):
        with within(NUMBER, 2):
            assert NUMBER.get() == 2
        assert NUMBER.get() == 1
    assert NUMBER.get() == 0


def test_errors_go_through() -> None:
    with pytest.raises(KeyError), within(NUMBER, 1):
        raise KeyError
    assert NUMBER.get() == 0


def test_other_threads_see_nothing_of_it() -> None:
    seen: list[int] = []
    with within(NUMBER, 1):
        thread = Thread(target=lambda: seen.append(NUMBER.get()))
        thread.start()
        thread.join()
    assert seen == [0]
