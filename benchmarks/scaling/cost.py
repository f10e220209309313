"""A cost model of many sockets, from measurements of two workers. No machine here has 64 sockets.

python -m benchmarks.scaling.cost [--sockets 64] [--link-us 20] [--link-gbs 10] [--page]

Its inputs are in measured.json, which the other commands of this folder write with --record. `--page` puts the tables into
benchmarks/scaling/README.md. Values measured while other work ran are left out of both, and listed.

Workers (replicas, processes over a graph), after Amdahl: a part f of one worker's time cannot be shared, so that S of them do S
/ (1 + f (S - 1)) times as much as one; f is measured with two. Two workers on one socket share its memory, which sockets do not:
f is rather too large for sockets.

Ranks of a divided model: a token takes 1/S of the time of one rank, which reads 1/S of the weights; two sums per layer; and
what two ranks took besides (layers that are not fused, joining the logits), which stays. On one machine a rank reads what S - 1
others wrote: S - 1 times the time of a sum of two. Between machines gloo sums around a ring (Patarasu & Yuan 2009,
doi:10.1016/j.jpdc.2008.09.002), 2 (S - 1) messages one after another, of 1/S of the bytes each, at the latency and rate of the
link that is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.scaling.measured import read, split
from hf_cpu_accel.cli.tables import results_table, wide_console

PAGE = Path(__file__).with_name("README.md")
_FLOAT = 4  # bytes, of hidden states
_SUMS = 2  # of each layer: after attention, and after its FFN


@dataclass(frozen=True)
class Workers:
    """Work that is shared among workers.

    Attributes:
        serial: the part of one worker's time that the others cannot take, from 0 to 1.
    """

    serial: float

    @classmethod
    def of(cls, speedup_of_two: float) -> Workers:
        """Return the model from the speedup of two workers over one.

        Raises:
            ValueError: that is not more than 0.
        """
        if not speedup_of_two > 0:
            raise ValueError(f"speedup_of_two={speedup_of_two}: expected more than 0")
        return cls(min(max(2 / speedup_of_two - 1, 0.0), 1.0))

    def speedup(self, count: int) -> float:
        """Return the speedup of `count` workers over one."""
        return count / (1 + self.serial * (count - 1))


@dataclass(frozen=True)
class Ranks:
    """A language model that is divided among ranks.

    Attributes:
        token_ms: Milliseconds of a token on one rank.
        sums: Sums over the ranks for each token.
        sum_us: ranks -> microseconds of one sum.
        rest_ms: Milliseconds of a token that several ranks do not divide.
    """

    token_ms: float
    sums: int
    sum_us: Callable[[int], float]
    rest_ms: float = 0.0

    def speedup(self, count: int) -> float:
        """Return the speedup in tokens/s of `count` ranks over one."""
        if count == 1:
            return 1.0
        return self.token_ms / (self.token_ms / count + self.sums * self.sum_us(count) / 1e3 + self.rest_ms)


def ring_us(count: int, numbers: int, link_us: float, link_gbs: float) -> float:
    """Return the microseconds of a ring all-reduce of `numbers` floats over `count` machines."""
    return 2 * (count - 1) * (link_us + numbers * _FLOAT / count / (link_gbs * 1e3))


def rows(measured: dict[str, dict[str, Any]], link_us: float, link_gbs: float) -> dict[str, Workers | Ranks]:
    """Return the cost model of each measurement, by name.

    Workers are left out where two reached no more than one: another resource was full, and the formula does not cover that.
    """
    models: dict[str, Workers | Ranks] = {}
    for name, values in measured.items():
        if "one_per_s" in values:
            if values["two_per_s"] > values["one_per_s"]:
                models[name] = Workers.of(values["two_per_s"] / values["one_per_s"])
        elif "one_s" in values:
            models[name] = Workers.of(values["one_s"] / values["two_s"])
        else:
            models.update(_ranks(name, values, link_us, link_gbs))
    return models


def _ranks(name: str, values: dict[str, Any], link_us: float, link_gbs: float) -> dict[str, Ranks]:
    token, two, numbers = values["one_token_ms"], values["exchange_us"], int(values["hidden"])
    sums = _SUMS * int(values["layers"])
    rest = max(values["token_ms"] - token / 2 - sums * two / 1e3, 0.0)
    link = f"machines, {link_us:g} us and {link_gbs:g} GB/s"
    return {
        f"{name}, one machine": Ranks(token, sums, lambda count: (count - 1) * two, rest),
        f"{name}, {link}": Ranks(token, sums, lambda count: ring_us(count, numbers, link_us, link_gbs), rest),
    }


def points(measured: dict[str, dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Return (name, one with a thread, one with two threads, two with a thread each) as measured."""
    found = []
    for name, values in measured.items():
        if "one_per_s" in values:
            found.append(
                (name, f"{values['one_per_s']:.0f} requests/s", "-", f"{values['two_per_s']:.0f} requests/s")
            )
        elif "one_s" in values:
            seconds = (values["one_s"], values["threads_s"], values["two_s"])
            found.append((name, *(f"{value:.2f} s" for value in seconds)))
        else:
            times = (values["one_token_ms"], values["threads_token_ms"], values["token_ms"])
            found.append((name, *(f"{1e3 / value:.1f} tokens/s" for value in times)))
            sizes = (values["one_mb"], values["one_mb"], values["weights_mb"])
            found.append(("- weights of each process", *(f"{size:.0f} MB" for size in sizes)))
    return found


def counts(sockets: int) -> list[int]:
    """Return 1, 2, 4, ... up to `sockets`."""
    return [2**power for power in range(sockets.bit_length()) if 2**power <= sockets]


def page_tables(measured: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the tables of benchmarks/scaling/README.md by their marks."""
    quiet, busy = split(measured)
    several = counts(64)
    tables = {
        "measured": _table(["", "one, 1 thread", "one, 2 threads", "two, 1 thread each"], points(quiet)),
        "model": _table(
            ["workers", *map(str, several)],
            [
                (name, *(f"{what.speedup(count):.1f}" for count in several))
                for name, what in rows(quiet, 20, 10).items()
            ],
        ),
    }
    loads = [values["load"] for values in quiet.values()]
    if loads:
        tables["measured"] += (
            f"\n\nThe load average was {min(loads):g} to {max(loads):g}, including the benchmark itself."
        )
    if busy:
        tables["measured"] += f"\n\n{left_out(busy)}"
    return tables


def left_out(busy: dict[str, dict[str, Any]]) -> str:
    """Return the sentence that lists the measurements to repeat."""
    each = (
        f"{name} (load {values['load']:g}, {values['machine']['cores']} cores)"
        for name, values in busy.items()
    )
    return f"Left out because other work ran at the same time, and to be measured again: {', '.join(each)}."


def _table(head: list[str], body: Sequence[Sequence[str]]) -> str:
    if not body:
        return "Not measured yet on a machine with nothing else to do."
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


def write_page(page: Path = PAGE, measured: dict[str, dict[str, Any]] | None = None) -> None:
    """Replace the tables of the page."""
    text = page.read_text(encoding="utf-8")
    for mark, table in page_tables(read() if measured is None else measured).items():
        pattern = rf"(<!-- {mark} -->\n).*?(<!-- end -->)"
        text = re.sub(
            pattern, lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text, flags=re.DOTALL
        )
    page.write_text(text, encoding="utf-8")


def main(
    sockets: Annotated[int, typer.Option(min=2, help="Maximum number of sockets.")] = 64,
    link_us: Annotated[float, typer.Option(min=0, help="Latency of a message between machines, in us.")] = 20,
    link_gbs: Annotated[float, typer.Option(min=0.001, help="Rate of a long message, in GB/s.")] = 10,
    page: Annotated[bool, typer.Option("--page", help="Write the tables of README.md.")] = False,
) -> None:
    """Print the predictions of the model as a table."""
    if page:
        write_page()
    table = results_table(["estimated speedup, workers", *map(str, counts(sockets))])
    quiet, busy = split(read())
    for name, what in rows(quiet, link_us, link_gbs).items():
        table.add_row(name, *(f"{what.speedup(count):.1f}" for count in counts(sockets)))
    console = wide_console()
    console.print(table)
    if busy:
        console.print(left_out(busy))


if __name__ == "__main__":
    typer.run(main)
