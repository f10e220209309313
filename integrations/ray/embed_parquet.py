"""Add a column of embeddings of texts to Parquet files, with workers of Ray Data.

python embed_parquet.py articles/ embedded/ ./minilm-int8 --texts body --unique id --workers 2
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import ray.data
import typer
from embedding import Embedder, check_columns
from ray.data.checkpoint import CheckpointConfig

# CPUs of Ray tasks. Reading and writing need little, and must be schedulable even if the workers have all other CPUs.
_IO_CPUS = {"num_cpus": 0.1}
_CPUS_PER_THREAD = 0.9


def embed(
    source: str,
    target: Path,
    model: str,
    *,
    texts: str = "text",
    output: str = "embedding",
    unique: str | None = None,
    workers: int = 1,
    threads: int = 1,
) -> None:
    """Write the rows of `source` to `target` with a column of embeddings, in their order and with their columns and types.

    Args:
        source: a Parquet file, or a folder of Parquet files.
        target: the folder to write.
        model: see `Embedder`.
        texts: see `Embedder`.
        output: see `Embedder`.
        unique: name of a column with a unique value per row. With it, a folder next to `target` records the written rows, and the
            same call resumes an interrupted one. It writes the remaining rows to further files.
        workers: number of processes, each with `threads` CPUs.
        threads: see `Embedder`.

    Raises:
        ValueError: a column is missing or has the wrong type, or `target` has files that are not of an interrupted call.
    """
    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    # The second version reads the footers of all files with 32 processes on any number of cores.
    context.use_datasource_v2 = False
    progress = target.with_name(f"{target.name}.progress")
    if target.is_dir() and any(target.iterdir()) and not (unique and progress.is_dir()):
        raise ValueError(
            f"target={str(target)!r} is not empty and cannot be resumed: expected an empty folder, or --unique and {progress.name} "
            "next to it from an interrupted call"
        )
    if unique is not None:
        context.checkpoint_config = CheckpointConfig(unique, str(progress.resolve()))
    with ray.data.DataContext.current(context):
        rows = ray.data.read_parquet(source, ray_remote_args=_IO_CPUS)
        columns = {field.name: str(field.type) for field in rows.schema().base_schema}
        check_columns(columns, texts, output, unique)
        embedded = rows.map_batches(
            Embedder,
            fn_constructor_args=(model, texts, output, threads),
            batch_size=256,
            batch_format="pyarrow",
            num_cpus=_CPUS_PER_THREAD * threads,
            compute=ray.data.ActorPoolStrategy(size=workers),
        )
        embedded.write_parquet(str(target.resolve()), ray_remote_args=_IO_CPUS)


def main(
    source: Annotated[str, typer.Argument(help="Parquet file, or folder of Parquet files.")],
    target: Annotated[Path, typer.Argument(help="Folder to write.")],
    model: Annotated[str, typer.Argument(help="Packed folder, or model of sentence-transformers.")],
    texts: Annotated[str, typer.Option(help="Column with the texts.")] = "text",
    output: Annotated[str, typer.Option(help="Column to add.")] = "embedding",
    unique: Annotated[
        str | None,
        typer.Option(help="Column with a unique value per row, to resume an interrupted job."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Number of threads per process.")] = 1,
) -> None:
    """Add a column of embeddings to Parquet files, on the cluster in RAY_ADDRESS or on a local one."""
    try:
        embed(
            source, target, model, texts=texts, output=output, unique=unique, workers=workers, threads=threads
        )
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    typer.run(main)
