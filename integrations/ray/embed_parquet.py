"""Embeddings of a column of texts in Parquet files, by workers of Ray Data, written beside the columns that were there.

python embed_parquet.py articles/ embedded/ ./minilm-int8 --texts body --unique id --workers 2
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import ray.data
import typer
from embedding import Embedder, check_columns
from ray.data.checkpoint import CheckpointConfig

# Of a CPU. Reading and writing take little beside a model, and must find room where workers have all CPUs.
_SMALL = {"num_cpus": 0.1}
_OF_A_THREAD = 0.9


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
    """Write the rows of `source` to `target` with a column of embeddings. Order, columns and their types are kept.

    Args:
        source: a Parquet file, or a folder of them.
        target: a folder.
        model, texts, output, threads: see `Embedder`.
        unique: a column that tells rows apart. With it, what was written is noted in a folder beside `target`, so that the same
            call goes on where an earlier one was broken off; the rows that were left come in files of their own then.
        workers: processes, each with `threads` CPUs.

    Raises:
        ValueError: a column is missing or of another type, or `target` has files that are not of a call that was broken off.
    """
    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    # The second version reads the ends of all files by 32 processes, however few cores there are.
    context.use_datasource_v2 = False
    progress = target.with_name(f"{target.name}.progress")
    if target.is_dir() and any(target.iterdir()) and not (unique and progress.is_dir()):
        raise ValueError(
            f"target={str(target)!r}: the folder is not empty, and {progress.name} is not beside it"
        )
    if unique is not None:
        context.checkpoint_config = CheckpointConfig(unique, str(progress.resolve()))
    with ray.data.DataContext.current(context):
        rows = ray.data.read_parquet(source, ray_remote_args=_SMALL)
        columns = {field.name: str(field.type) for field in rows.schema().base_schema}
        check_columns(columns, texts, output, unique)
        embedded = rows.map_batches(
            Embedder,
            fn_constructor_args=(model, texts, output, threads),
            batch_size=256,
            batch_format="pyarrow",
            num_cpus=_OF_A_THREAD * threads,
            compute=ray.data.ActorPoolStrategy(size=workers),
        )
        embedded.write_parquet(str(target.resolve()), ray_remote_args=_SMALL)


def main(
    source: Annotated[str, typer.Argument(help="A Parquet file, or a folder of them.")],
    target: Annotated[Path, typer.Argument(help="A folder for the files with embeddings.")],
    model: Annotated[str, typer.Argument(help="A packed folder, or a model of sentence-transformers.")],
    texts: Annotated[str, typer.Option(help="The column to be read.")] = "text",
    output: Annotated[str, typer.Option(help="The column to be made.")] = "embedding",
    unique: Annotated[
        str | None, typer.Option(help="A column that tells rows apart, to go on after an interruption.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Of each process.")] = 1,
) -> None:
    """Embed a column of texts in Parquet files; RAY_ADDRESS names a cluster, else one is started on this machine."""
    try:
        embed(
            source, target, model, texts=texts, output=output, unique=unique, workers=workers, threads=threads
        )
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    typer.run(main)
