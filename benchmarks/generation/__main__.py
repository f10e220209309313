"""The benchmark of text generation, rivals included:

python -m benchmarks.peers.setup llamacpp optimum-intel
python -m benchmarks.generation Llama-3.2-1B --systems ours-bf16,ours-int8,llamacpp-q8_0,openvino-int8
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from benchmarks.generation import harness, report
from benchmarks.generation.systems import BASE, DEFAULT, SYSTEMS
from benchmarks.peers.registry import GENERATORS
from benchmarks.session import GenerationSettings, Keep, Out, Priority, Session, Threads, chosen_systems
from hf_cpu_accel.cli import random_models

_ALL = (*SYSTEMS, *GENERATORS)
_MODELS = ("gpt2", "Qwen2.5-0.5B", "Llama-3.2-1B")


def main(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help=f"A well-known shape with random weights, or a checkpoint folder [default: {' '.join(_MODELS)}]",
        ),
    ] = None,
    chosen: Annotated[
        str, typer.Option("--systems", help=f"Any of {', '.join(_ALL)}; {BASE} is always there.")
    ] = ",".join(DEFAULT),
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 128,
    new: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Texts of each system; 6 or more give an interval.")] = 6,
    threads: Threads = None,
    priority: Priority = True,
    out: Out = None,
    record: Keep = None,
) -> None:
    """Measure prefill and decode of eager, this package and its rivals, side by side on this machine, batch 1."""
    wanted = chosen_systems(chosen, _ALL)
    for name in models or ():
        if not os.path.isdir(name) and name not in random_models.NAMES:
            raise typer.BadParameter(
                f"{name!r} is no folder and no known shape; accepted: {', '.join(random_models.NAMES)}"
            )
    session = Session(
        "benchmarks.generation",
        GenerationSettings(prompt, new, rounds, threads, priority),
        out,
        record,
        "Text generation",
        run=harness.run,
        show=report,
    )
    for name in models or _MODELS:
        session.measure(name, wanted, f"{name}, {prompt} + {new} tokens")
    session.close()


if __name__ == "__main__":
    typer.run(main)
