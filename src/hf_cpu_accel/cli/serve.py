"""`hf-cpu-accel serve`: models behind HTTP, for clients of text-embeddings-inference and of OpenAI."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from hf_cpu_accel.cli import options
from hf_cpu_accel.cli.failures import cannot_load

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hf_cpu_accel.serve.http.app import Service
    from hf_cpu_accel.serve.http.metrics import Metrics
    from hf_cpu_accel.serve.loading import Settings
    from hf_cpu_accel.serve.models import Models, Served

# torch and everything on it is imported inside the command: `hf-cpu-accel --help` must not wait for it.

_NEEDS = ("fastapi", "uvicorn", "prometheus_client", "multipart", "openai")


def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Model ids or local folders; NAME=MODEL to be called NAME.",
            show_default=False,
        ),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="HF_CPU_ACCEL_API_KEY",
            help="What clients have to send as Authorization: Bearer KEY.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="As accelerate_for_cpu takes it.")] = "auto",
    accuracy: Annotated[float | None, options.accuracy()] = None,
    threads: Annotated[
        int | None, options.threads("Threads of each model [default: what doctor says].")
    ] = None,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of a batch of texts, with padding.")
    ] = 2048,
    batch_wait: Annotated[
        float,
        typer.Option(
            min=0, max=1000, help="Milliseconds that a batch waits for others, while there are some."
        ),
    ] = 2.0,
    waiting: Annotated[
        int, typer.Option(min=1, help="Texts that may wait; more are answered with 429.")
    ] = 4096,
    rows: Annotated[int, typer.Option(min=1, help="Chats that are answered at a time.")] = 8,
    chat_waiting: Annotated[int, typer.Option(min=1, help="Chats that may wait.")] = 64,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a prompt with its answer [default: the model's].")
    ] = None,
    max_body: Annotated[
        float, typer.Option(min=0.001, help="Largest request in MB; audio may have 25.")
    ] = 2.0,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for running requests after SIGTERM.")] = 60.0,
) -> None:
    """Serve accelerated models over HTTP.

    Embedding models, classifiers, language models and speech recognizers, by the endpoints of text-embeddings-inference and OpenAI.
    Examples:

    hf-cpu-accel serve sentence-transformers/all-MiniLM-L6-v2 --dtype int8

    hf-cpu-accel serve embed=./my-embedder rank=cross-encoder/ms-marco-MiniLM-L6-v2 --api-key secret
    """
    from rich.console import Console

    console = Console(highlight=False)
    missing = [package for package in _NEEDS if find_spec(package) is None]
    if missing:
        console.print(
            f'{", ".join(missing)} is not installed: pip install "hf_cpu_accel\\[serve]"', style="red"
        )
        raise typer.Exit(1)

    from hf_cpu_accel.config import CPUAccelConfig
    from hf_cpu_accel.serve.http.app import Service
    from hf_cpu_accel.serve.http.metrics import Metrics
    from hf_cpu_accel.serve.loading import Settings, called
    from hf_cpu_accel.serve.models import Models
    from hf_cpu_accel.serve.server import Server
    from hf_cpu_accel.serve.server import serve as run

    accelerate = {"dtype": dtype, "accuracy": accuracy, "threads": threads}
    try:
        CPUAccelConfig(**accelerate)  # type: ignore[arg-type]
    except ValueError as error:  # a misspelt dtype is told before a model is loaded
        raise typer.BadParameter(str(error)) from error
    batching = {"max_tokens": batch_tokens, "max_wait": batch_wait / 1e3, "max_waiting": waiting}
    engine = {"rows": rows, "waiting": chat_waiting, "max_length": max_length}
    if len(set(map(called, models))) < len(models):
        raise typer.BadParameter(f"MODEL: names have to differ: {', '.join(map(called, models))}")
    metrics = Metrics()
    served = Models(_load_all(console, models, metrics, Settings(accelerate, batching, engine)))
    service = Service(served, metrics, api_key=api_key, max_body=round(max_body * 1e6))
    run(
        Server(
            service, host=host, port=port, grace=grace, on_start=lambda url: _announce(console, service, url)
        )
    )


def _load_all(console: Console, models: list[str], metrics: Metrics, settings: Settings) -> list[Served]:
    from hf_cpu_accel.serve.loading import load

    loaded = []
    for number, model in enumerate(models, start=1):
        try:
            with console.status(f"loading {model} ({number} of {len(models)})"):
                loaded.append(load(model, metrics, settings))
        except OSError as error:
            raise cannot_load(console, model, error) from error
        except (ValueError, RuntimeError) as error:
            console.print(f"{model}: {error}", style="red", markup=False)
            raise typer.Exit(1) from error
    return loaded


def _announce(console: Console, service: Service, url: str) -> None:
    """Told once the port is open."""
    console.print(_table(service.models))
    key = "with the API key" if service.gate.has_key else "without an API key"
    console.print(
        f"[bold]{url}[/bold] {key}; {url}/docs describes it. Ctrl-C ends the server.", soft_wrap=True
    )


def _table(models: Models) -> Table:
    from hf_cpu_accel.api import explain
    from hf_cpu_accel.cli.tables import results_table
    from hf_cpu_accel.serve.models import ENDPOINTS

    table = results_table(["model", "dtype", "threads", "modules replaced", "endpoints"])
    for served in models:
        plan = explain(served.model)
        paths = [path for capability in served.capabilities for path in ENDPOINTS[capability]]
        table.add_row(served.name, plan.dtype, str(plan.threads), str(len(plan.replaced)), " ".join(paths))
    return table
