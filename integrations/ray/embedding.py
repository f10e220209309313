"""Add a column of embeddings to a batch of a table. This module does not need Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

import hf_cpu_accel

if TYPE_CHECKING:
    import pyarrow as pa

_TEXT = ("string", "large_string", "string_view")


def check_columns(columns: Mapping[str, str], texts: str, output: str, unique: str | None = None) -> None:
    """Check the columns of a table.

    Args:
        columns: {name: Arrow type} of the columns.
        texts: name of the column with the texts.
        output: name of the column to add.
        unique: name of the column with a unique value per row, or None.

    Raises:
        ValueError: a missing column, a column of texts with another type, or an output column that already exists.
    """
    for argument, name in (("texts", texts), ("unique", unique)):
        if name is not None and name not in columns:
            raise ValueError(
                f"{argument}={name!r} is not a column of the table; it has the columns {', '.join(columns)}"
            )
    if columns[texts] not in _TEXT:
        raise ValueError(
            f"texts={texts!r} is a column of type {columns[texts]}; accepted types are {', '.join(_TEXT)}"
        )
    if output in columns:
        raise ValueError(f"output={output!r} is already a column of the table; pass another name")


class Embedder:
    """Embed the texts of batches with an accelerated model, in a worker.

    Args:
        model: a packed folder, which the workers of a machine share, or another model of sentence-transformers.
        texts: name of the column with the texts.
        output: name of the column to add: lists of float32 with one length, null for a null text.
        threads: number of threads of this worker.
    """

    def __init__(self, model: str, texts: str = "text", output: str = "embedding", threads: int = 1) -> None:
        from sentence_transformers import SentenceTransformer

        self.model = SentenceTransformer(model, device="cpu").eval()
        hf_cpu_accel.accelerate_for_cpu(self.model, originals="drop", threads=threads)
        self.texts, self.output, self.threads = texts, output, threads
        self.size: int = self.model.encode([""]).shape[-1]

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return `table` with the new column at its end."""
        import pyarrow as pa

        torch.set_num_threads(self.threads)  # per calling thread, and Ray calls from several threads
        column = table.column(self.texts)
        valid = column.is_valid().to_numpy()
        vectors = np.zeros((len(column), self.size), np.float32)
        if valid.any():  # encode() sorts texts by length, which avoids padding
            vectors[valid] = self.model.encode(column.drop_null().to_pylist())
        values, null = pa.array(vectors.reshape(-1)), pa.array(~valid)
        embeddings = pa.FixedSizeListArray.from_arrays(values, self.size, mask=null)
        return table.append_column(self.output, embeddings)
