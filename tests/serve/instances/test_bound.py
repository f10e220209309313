"""The bound of these tests: a wait without end is a failure."""

import os
import threading
from concurrent.futures import Future

import pytest

from tests.serve.instances.bound import within


@pytest.mark.parametrize("wait", ["event", "future", "thread", "pipe"])
def test_waits_have_a_time_limit(wait):
    end = threading.Event()
    thread = threading.Thread(target=end.wait, daemon=True)
    thread.start()
    reading, writing = os.pipe()
    waits = {
        "event": threading.Event().wait,
        "future": Future().result,
        "thread": thread.join,
        "pipe": lambda: os.read(reading, 1),
    }
    with pytest.raises(TimeoutError, match="not done within"), within(0.1):
        waits[wait]()
    end.set()
    os.close(reading)
    os.close(writing)
