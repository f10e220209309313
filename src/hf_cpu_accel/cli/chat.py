"""`hf-cpu-accel chat`: chat with an accelerated model in the terminal and see its speed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hf_cpu_accel.cli import options
from hf_cpu_accel.cli.failures import cannot_load

# The command imports torch when it runs, so that `hf-cpu-accel --help` does not wait for it.
if TYPE_CHECKING:
    from rich.console import Console

    from hf_cpu_accel.cli.chat_session import Answer, ChatSession

_HINT = "Ctrl-C stops an answer, /reset clears the conversation, Ctrl-D or /exit quits"


def chat(
    model: options.Model = None,
    dtype: Annotated[str, options.dtype()] = "auto",
    new: Annotated[int, typer.Option(min=1, help="Maximum number of tokens in an answer.")] = 512,
    random_config: Annotated[
        str | None,
        options.random_config(
            "Use a well-known architecture with random weights instead of MODEL; no network. Its answers are noise."
        ),
    ] = None,
    threads: Annotated[int | None, options.threads()] = None,
) -> None:
    """Chat with an accelerated model. Answers are streamed, and each shows its tokens/s.

    A model without a chat template continues your text. Examples:

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
        console.print(
            "The model has no chat template: it continues each text that you type, without the earlier ones.",
            style="dim",
        )
    _talk(session, console)


def _talk(session: ChatSession, console: Console) -> None:
    while True:
        try:
            line = console.input("[bold]> [/bold]").strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print(f"\n{_HINT}", style="dim")
            continue
        if line == "/exit":
            return
        if line == "/reset":
            session.reset()
        elif line:
            answer = session.answer(line, _write)
            console.print()
            console.print(_speed(answer), style="dim")


def _write(text: str) -> None:
    # Not through rich, which would parse brackets as markup and wrap lines.
    sys.stdout.write(text)
    sys.stdout.flush()


def _speed(answer: Answer) -> str:
    parts = ["stopped"] if answer.stopped else []
    parts.append(f"{answer.tokens} token{'s' if answer.tokens != 1 else ''}")
    if answer.first is not None:
        parts.append(f"first token after {answer.first:.2f} s")
    if answer.rate is not None:
        parts.append(f"{answer.rate:.1f} tokens/s")
    return ", ".join(parts)
