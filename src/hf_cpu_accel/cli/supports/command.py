"""`hf-cpu-accel supports`: build a few layers of a model from its config, accelerate them, and say what became of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_cpu_accel.cli.failures import cannot_load

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedConfig

    from hf_cpu_accel.cli.supports.layers import Layers

# torch and everything on it is imported inside the command: `hf-cpu-accel --help` must not wait for it.

_SHARE_OF_MEMORY = 0.4  # of what is free, for weights that are packed beside themselves


def supports(
    model: Annotated[
        str,
        typer.Argument(
            help="Model id, local folder, GGUF file, a config.json, or a model type of transformers (`qwen3`).",
            show_default=False,
        ),
    ],
    dtype: Annotated[str, typer.Option(help="As accelerate_for_cpu takes it.")] = "auto",
    every_module: Annotated[bool, typer.Option("--plan", help="Also print what explain() says.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, no table.")] = False,
) -> None:
    """Would this model run fused? Its config is all that is read: layers of its widths are built with random weights.

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
        found = look(config, settings)
    except OSError as error:
        raise cannot_load(console, model, error) from error
    except ValueError as error:
        console.print(f"{model}: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(
            json.dumps(
                {"model": model, **found["told"], "layers": [asdict(row) for row in found["layers"]]},
                indent=2,
            )
        )
        return
    _report(console, model, config, found, every_module=every_module)


def read_config(model: str) -> PreTrainedConfig:
    """
    Raises:
        OSError: there is no such model.
        ValueError: it is none of transformers' own.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    from hf_cpu_accel.frontends.gguf import located

    folder = Path(model)
    if folder.is_dir() and (folder / "model_index.json").is_file():
        raise ValueError(
            "it is a pipeline of diffusers: name the folder of one of its models of transformers, "
            "or accelerate it and see explain(pipeline)"
        )
    if not folder.exists() and model in CONFIG_MAPPING:
        return AutoConfig.for_model(model)
    name, options = located(model)
    config = AutoConfig.from_pretrained(name, **options)
    if hasattr(config, "auto_map") and config.model_type not in CONFIG_MAPPING:
        raise ValueError("its code is its own and not transformers': load it, and see explain(model)")
    return config


def look(config: PreTrainedConfig, settings: Any) -> dict[str, Any]:
    """{"told": facts for JSON, "layers": list of `Layers`, "plan"}.

    Raises:
        ValueError: as `shallow`.
    """
    import psutil

    from hf_cpu_accel.api import accelerate_for_cpu, explain
    from hf_cpu_accel.cli.supports.layers import layers, members
    from hf_cpu_accel.cli.supports.shallow import shallow

    made = shallow(config, int(_SHARE_OF_MEMORY * psutil.virtual_memory().available))
    kinds = members(made.model)
    accelerate_for_cpu(made.model, settings)
    plan = explain(made.model)
    told = {"class": type(made.model).__name__, "dtype": plan.dtype, "depths": made.depths}
    return {"told": told, "layers": layers(kinds, plan), "plan": plan}


def _report(
    console: Console, model: str, config: PreTrainedConfig, found: dict[str, Any], *, every_module: bool
) -> None:
    from rich import box
    from rich.table import Table

    told, rows = found["told"], found["layers"]
    console.print(f"{model}: {told['class']} ({config.model_type}), {told['dtype']}")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("layers", "of", "class", "run as", "because"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        depth = told["depths"].get(row.path)
        table.add_row(
            row.path,
            "" if depth is None else str(depth),
            row.kind,
            row.runs_as or "parts",
            "; ".join(row.reasons),
        )
    if rows:
        console.print(table)
    console.print(verdict(rows))
    if every_module:
        console.print(found["plan"])


def verdict(rows: list[Layers]) -> str:
    """One sentence."""
    whole = [row for row in rows if row.runs_as is not None]
    if not rows:
        return "It has no layers of transformers: its parts are served one by one (--plan)."
    if len(whole) == len(rows):
        return "Every layer runs as one call."
    if not whole:
        return "No layer runs as one call: their parts are served one by one (--plan)."
    return "Some layers run as one call, of the others the parts are served one by one (--plan)."
