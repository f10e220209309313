"""Files that something has happened to: how bytes are changed, and what becomes of each. A case is a number."""

from __future__ import annotations

import argparse
import random
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

Mutation = Callable[[bytes, random.Random], bytes]
Run = Callable[[int, int], tuple[Counter[str], list[str]]]
"""(cases, seed) -> how often which mutation led to what; the cases that went wrong."""


class Hung(BaseException):
    """It took more CPU than it may."""


def flip(content: bytes, start: int, end: int, draw: random.Random) -> bytes:
    """One to three bits of the bytes from `start` to `end` are others."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        bit = draw.randrange(start * 8, end * 8)
        changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


def truncate(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.choice((draw.randrange(len(content)), draw.randrange(2000), len(content) - 1))]


def append(content: bytes, draw: random.Random) -> bytes:
    return content + draw.randbytes(draw.choice((1, 64, 4096)))


def zero_page(content: bytes, draw: random.Random) -> bytes:
    """A page that never reached the disk."""
    start = draw.randrange(0, len(content), 4096)
    return content[:start] + bytes(min(4096, len(content) - start)) + content[start + 4096 :]


def outcome(read: Callable[[], str], refusals: tuple[type[Exception], ...], *, seconds: int) -> str:
    """What `read` says of a file, or "refused", "RAISED ..." if it raises something else, "HUNG" if it takes more CPU seconds."""
    try:
        with _limited(seconds):
            return read()
    except refusals:
        return "refused"
    except Hung:
        return "HUNG"
    except Exception as error:
        return f"RAISED {type(error).__name__}: {error}"


def run_cases(
    attempt: Callable[[random.Random], tuple[str, str]], cases: int, seed: int, *, right: Collection[str]
) -> tuple[Counter[str], list[str]]:
    """What became of the cases `seed`, `seed + 1`, ..., and those of them that went wrong.

    Args:
        attempt: draws a mutation, and gives its name and what became of the file.
        right: the first words of outcomes that are right.
    """
    counts: Counter[str] = Counter()
    wrong = []
    for case in range(seed, seed + cases):
        name, became = attempt(random.Random(case))
        counts[f"{name}: {became}"] += 1
        if became.split()[0] not in right:
            wrong.append(f"case {case}, {name}: {became}")
    return counts, wrong


def main(run: Run, description: str | None) -> None:
    """The command line of a module that mutates files; exits with 1 if a case went wrong."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cases", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seen, failures = run(options.cases, options.seed)
    print("\n".join(f"{count:6} {what}" for what, count in sorted(seen.items())))
    print("\n".join(failures))
    raise SystemExit(bool(failures))


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(*unused: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of CPU: a busy machine is slow, too
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
