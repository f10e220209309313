"""What two of something showed, carried on to many sockets. A model and no measurement: nobody here has 64 sockets.

python -m benchmarks.scaling.cost [--sockets 64] [--link-us 20] [--link-gbs 10]

Its inputs are in measured.json, which the other commands of this folder write with --record.

Workers (replicas, instances, processes over a graph), after Amdahl: of the time of one, a part f cannot be shared, so that S of them do
S / (1 + f (S - 1)) of the work of one; f is what two showed. Two workers on one socket share its memory, which sockets do not, so f is
rather too large for sockets.

Ranks of a divided model: a token takes 1/S of the time of one rank, which reads 1/S of the weights, and two sums per layer. gloo sums
around a ring (Patarasu & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002): 2 (S - 1) messages one after another of n / S bytes each, each
taking the latency of the link and its bytes at the link's rate. Measured between two ranks of this machine; --link-us and --link-gbs put
another link in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from benchmarks.scaling.measured import read
from hf_cpu_accel.cli.tables import results_table, wide_console

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
        """From how much as much two do as one.

        Raises:
            ValueError: that is not more than 0.
        """
        if not speedup_of_two > 0:
            raise ValueError(f"speedup_of_two={speedup_of_two}: expected more than 0")
        return cls(min(max(2 / speedup_of_two - 1, 0.0), 1.0))

    def speedup(self, count: int) -> float:
        """How much as much `count` workers do as one."""
        return count / (1 + self.serial * (count - 1))


@dataclass(frozen=True)
class Ranks:
    """A language model that is divided among ranks.

    Attributes:
        token_ms: of a token on one rank.
        layers, hidden: of the model.
        link_us, link_gbs: latency of a message between two ranks, and the rate of a large one.
    """

    token_ms: float
    layers: int
    hidden: int
    link_us: float
    link_gbs: float

    def sum_us(self, ranks: int) -> float:
        """A sum of one token's hidden states over all ranks."""
        message_us = self.link_us + self.hidden * _FLOAT / ranks / (self.link_gbs * 1e3)
        return 2 * (ranks - 1) * message_us

    def speedup(self, ranks: int) -> float:
        """How many tokens `ranks` write in the time that one needs for one."""
        time = self.token_ms / ranks + _SUMS * self.layers * self.sum_us(ranks) / 1e3
        return self.token_ms / time


def link_of(small_us: float, large_ms: float, numbers: int) -> tuple[float, float]:
    """Latency in us and rate in GB/s of the link between two ranks, by the time of a sum of few and of `numbers` floats."""
    latency = small_us / 2
    sent = numbers * _FLOAT / 2
    return latency, sent / max(large_ms * 1e3 / 2 - latency, 1e-3) / 1e3


def rows(
    measured: dict[str, dict[str, Any]], link_us: float | None = None, link_gbs: float | None = None
) -> dict[str, Workers | Ranks]:
    """What can be told of the things that were measured, by their names."""
    found: dict[str, Workers | Ranks] = {}
    for name, values in measured.items():
        if "one_per_s" in values:
            found[name] = Workers.of(values["two_per_s"] / values["one_per_s"])
        elif "one_s" in values:
            found[name] = Workers.of(values["one_s"] / values["two_s"])
        else:
            hidden, layers = int(values["hidden"]), int(values["layers"])
            latency, rate = link_of(
                values["all_reduce_us"], values["large_all_reduce_ms"], hidden * int(values["prompt"])
            )
            token = values["one_token_ms"]
            found[f"{name}, link as measured"] = Ranks(token, layers, hidden, latency, rate)
            if link_us is not None and link_gbs is not None:
                name = f"{name}, link of {link_us:g} us and {link_gbs:g} GB/s"
                found[name] = Ranks(token, layers, hidden, link_us, link_gbs)
    return found


def counts(sockets: int) -> list[int]:
    """1, 2, 4, ... up to `sockets`."""
    return [2**power for power in range(sockets.bit_length()) if 2**power <= sockets]


def main(
    sockets: Annotated[int, typer.Option(min=2, help="Up to how many.")] = 64,
    link_us: Annotated[float, typer.Option(min=0, help="Latency of another link, in us.")] = 20,
    link_gbs: Annotated[float, typer.Option(min=0.001, help="Its rate, in GB/s.")] = 10,
) -> None:
    """Print the speed-ups of the model as a table."""
    table = results_table(["speed-up, by a model", *map(str, counts(sockets))])
    for name, what in rows(read(), link_us, link_gbs).items():
        table.add_row(name, *(f"{what.speedup(count):.1f}" for count in counts(sockets)))
    wide_console().print(table)


if __name__ == "__main__":
    typer.run(main)
