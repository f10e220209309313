"""`hf-cpu-accel serve`: serve models over HTTP, for clients of text-embeddings-inference and OpenAI."""

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

# The command imports torch when it runs, so that `hf-cpu-accel --help` does not wait for it.

_NEEDS = ("fastapi", "uvicorn", "prometheus_client", "multipart", "openai")


def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Model ids, local folders or GGUF files; with NAME=MODEL, clients use NAME.",
            show_default=False,
        ),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 accepts connections from other machines.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free port.")
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="HF_CPU_ACCEL_API_KEY",
            help="Key that clients must send as Authorization: Bearer KEY.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[str, options.dtype()] = "auto",
    accuracy: Annotated[float | None, options.accuracy()] = None,
    threads: Annotated[
        int | None,
        options.threads("Number of threads per model [default: chosen for the machine; see doctor]."),
    ] = None,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum tokens of a batch of texts, including padding.")
    ] = 2048,
    batch_wait: Annotated[
        float,
        typer.Option(
            min=0,
            max=1000,
            help="Maximum milliseconds that a batch waits for as many texts as the last batch had.",
        ),
    ] = 2.0,
    waiting: Annotated[
        int, typer.Option(min=1, help="Maximum number of waiting texts; more are rejected with status 429.")
    ] = 4096,
    rows: Annotated[int, typer.Option(min=1, help="Number of chats that generate at the same time.")] = 8,
    chat_waiting: Annotated[int, typer.Option(min=1, help="Maximum number of waiting chats.")] = 64,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=2, help="Maximum tokens of a prompt with its answer [default: the limit of the model]."
        ),
    ] = None,
    max_body: Annotated[
        float, typer.Option(min=0.001, help="Maximum size of a request in MB; for audio it is 25 MB.")
    ] = 2.0,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests may take after SIGTERM.")
    ] = 60.0,
) -> None:
    """Serve accelerated models over HTTP, with the endpoints of text-embeddings-inference and OpenAI.

    Serves embedding models, classifiers, language models and speech recognizers. Examples:

    hf-cpu-accel serve sentence-transformers/all-MiniLM-L6-v2 --dtype int8

    hf-cpu-accel serve embed=./my-embedder rank=cross-encoder/ms-marco-MiniLM-L6-v2 --api-key secret
    """
    from rich.console import Console

    console = Console(highlight=False)
    missing = [package for package in _NEEDS if find_spec(package) is None]
    if missing:
        console.print(
            f'not installed: {", ".join(missing)}; run pip install "hf_cpu_accel\\[serve]"', style="red"
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
    except ValueError as error:  # reject an unknown dtype before loading a model
        raise typer.BadParameter(str(error)) from error
    batching = {"max_tokens": batch_tokens, "max_wait": batch_wait / 1e3, "max_waiting": waiting}
    engine = {"rows": rows, "waiting": chat_waiting, "max_length": max_length}
    if len(set(map(called, models))) < len(models):
        raise typer.BadParameter(
            f"MODEL: the names must differ, got {', '.join(map(called, models))}; rename one with NAME=MODEL"
        )
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
    """Print the models and the address, once the port is open."""
    console.print(_table(service.models))
    key = "with the API key" if service.gate.has_key else "without an API key"
    console.print(
        f"[bold]{url}[/bold] {key}; see {url}/docs for the API. Ctrl-C stops the server.", soft_wrap=True
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
