"""`hf-cpu-accel chat`: talk to a model for a minute, to see what it says and how fast."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hf_cpu_accel.cli import options
from hf_cpu_accel.cli.failures import cannot_load

# torch and everything on it is imported inside the command: `hf-cpu-accel --help` must not wait for it.
if TYPE_CHECKING:
    from rich.console import Console

    from hf_cpu_accel.cli.chat_session import Answer, ChatSession

_HINT = "Ctrl-C stops an answer, /reset forgets what was said, Ctrl-D or /exit leaves"


def chat(
    model: options.Model = None,
    dtype: Annotated[str, typer.Option(help="As accelerate_for_cpu takes it.")] = "auto",
    new: Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")] = 512,
    random_config: Annotated[
        str | None,
        options.random_config(
            "Instead of MODEL, offline: a well-known shape with random weights; what it says is noise."
        ),
    ] = None,
    threads: Annotated[int | None, options.threads("[default: what doctor says]")] = None,
) -> None:
    """Chat with an accelerated model; its answers appear as they are written, each with its tokens per second.

    A model without a chat template goes on with what you type. Examples:

    hf-cpu-accel chat HuggingFaceTB/SmolLM2-360M-Instruct --dtype int8

    hf-cpu-accel chat ./my-model
    """
    from rich.console import Console

    from hf_cpu_accel.cli import chat_session
    from hf_cpu_accel.runtime.threads import apply_threads

    console = Console(highlight=False)
    apply_threads(threads)
    try:
        with console.status(f"loading {model or random_config}"):
            session = chat_session.open_session(model, random_config, dtype=dtype, new=new, threads=threads)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except OSError as error:
        raise cannot_load(console, model, error, random_config=True) from error
    console.print(f"[bold]{session.title}[/bold], {session.dtype}. {_HINT}.")
    if not session.has_template:
        console.print("It has no chat template: it goes on with what you type, and forgets it.", style="dim")
    _talk(session, console)


def _talk(session: ChatSession, console: Console) -> None:
    while True:
        try:
            said = console.input("[bold]> [/bold]").strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print(f"\n{_HINT}", style="dim")
            continue
        if said == "/exit":
            return
        if said == "/reset":
            session.reset()
        elif said:
            answer = session.answer(said, _write)
            console.print()
            console.print(_speed(answer), style="dim")


def _write(text: str) -> None:
    # Not through rich, which would take brackets for markup and wrap lines.
    sys.stdout.write(text)
    sys.stdout.flush()


def _speed(answer: Answer) -> str:
    parts = ["stopped"] if answer.stopped else []
    parts.append(f"{answer.tokens} token{'s' if answer.tokens != 1 else ''}")
    if answer.first is not None:
        parts.append(f"first after {answer.first:.2f} s")
    if answer.rate is not None:
        parts.append(f"then {answer.rate:.1f} per second")
    return ", ".join(parts)
