"""`hf-cpu-accel supports`: build a few layers of a model from its config, accelerate them, and report the result."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_cpu_accel.cli import options
from hf_cpu_accel.cli.failures import cannot_load

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedConfig

    from hf_cpu_accel.cli.supports.layers import Layers

# The command imports torch when it runs, so that `hf-cpu-accel --help` does not wait for it.

_SHARE_OF_MEMORY = 0.4  # of the free memory, because original and packed weights are in memory together


def supports(
    model: Annotated[
        str,
        typer.Argument(
            help="Model id, local folder, GGUF file, config.json, or a model type of transformers (`qwen3`).",
            show_default=False,
        ),
    ],
    dtype: Annotated[str, options.dtype()] = "auto",
    every_module: Annotated[bool, typer.Option("--plan", help="Also print the output of explain().")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Check whether the layers of a model run fused, without downloading its weights.

    Only the config is read. A few layers of its sizes are built with random weights and accelerated.

    hf-cpu-accel supports Qwen/Qwen3-0.6B
    """
    from rich.console import Console

    from hf_cpu_accel.config import CPUAccelConfig

    console = Console(highlight=False, soft_wrap=True)
    try:
        settings = CPUAccelConfig(dtype=dtype, accuracy=None)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        config = read_config(model)
        result = inspect(config, settings)
    except OSError as error:
        raise cannot_load(console, model, error) from error
    except ValueError as error:
        console.print(f"{model}: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(
            json.dumps(
                {"model": model, **result["facts"], "layers": [asdict(row) for row in result["layers"]]},
                indent=2,
            )
        )
        return
    _report(console, model, config, result, every_module=every_module)


def read_config(model: str) -> PreTrainedConfig:
    """Read the config of a model id, folder, GGUF file, config.json or model type.

    Raises:
        OSError: no such model.
        ValueError: a diffusers pipeline, or a model with remote code.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    from hf_cpu_accel.frontends.gguf import located

    folder = Path(model)
    if folder.is_dir() and (folder / "model_index.json").is_file():
        raise ValueError(
            "it is a diffusers pipeline, which is not supported: pass the folder of one of its transformers models, "
            "or accelerate the pipeline and print explain(pipeline)"
        )
    if not folder.exists() and model in CONFIG_MAPPING:
        return AutoConfig.for_model(model)
    name, options = located(model)
    config = AutoConfig.from_pretrained(name, **options)
    if hasattr(config, "auto_map") and config.model_type not in CONFIG_MAPPING:
        raise ValueError(
            "its code is remote code and not part of transformers: load it, accelerate it and print explain(model)"
        )
    return config


def inspect(config: PreTrainedConfig, settings: Any) -> dict[str, Any]:
    """Build a shallow model, accelerate it, and return {"facts": for JSON, "layers": list of `Layers`, "plan": its plan}.

    Raises:
        ValueError: from `shallow`.
    """
    import psutil

    from hf_cpu_accel.api import accelerate_for_cpu, explain
    from hf_cpu_accel.cli.supports.layers import layers, members
    from hf_cpu_accel.cli.supports.shallow import shallow

    built = shallow(config, int(_SHARE_OF_MEMORY * psutil.virtual_memory().available))
    kinds = members(built.model)
    accelerate_for_cpu(built.model, settings)
    plan = explain(built.model)
    facts = {"class": type(built.model).__name__, "dtype": plan.dtype, "depths": built.depths}
    return {"facts": facts, "layers": layers(kinds, plan), "plan": plan}


def _report(
    console: Console, model: str, config: PreTrainedConfig, result: dict[str, Any], *, every_module: bool
) -> None:
    from rich import box
    from rich.table import Table

    facts, rows = result["facts"], result["layers"]
    console.print(f"{model}: {facts['class']} ({config.model_type}), {facts['dtype']}")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("layers", "number", "class", "run as", "reason"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        depth = facts["depths"].get(row.path)
        table.add_row(
            row.path,
            "" if depth is None else str(depth),
            row.kind,
            row.runs_as or "separate modules",
            "; ".join(row.reasons),
        )
    if rows:
        console.print(table)
    console.print(verdict(rows))
    if every_module:
        console.print(result["plan"])


def verdict(rows: list[Layers]) -> str:
    """Return the result as one sentence."""
    fused = [row for row in rows if row.runs_as is not None]
    if not rows:
        return (
            "The model has no transformer layers. Its modules are accelerated separately; --plan lists them."
        )
    if len(fused) == len(rows):
        return "Every layer runs as one call."
    if not fused:
        return "No layer runs as one call. Their modules are accelerated separately; --plan lists them."
    return "Some layers run as one call. The modules of the others are accelerated separately; --plan lists them."
