"""From a batch of a table to the same batch with a column of embeddings. Nothing here needs Ray."""

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
    """
    Args:
        columns: the names of a table's columns, and their types as Arrow calls them.
        texts, output, unique: the names of the column to be read, of the one to be made, and of the one that tells rows apart.

    Raises:
        ValueError: a column is not there, is not of texts, or is there already.
    """
    for argument, name in (("texts", texts), ("unique", unique)):
        if name is not None and name not in columns:
            raise ValueError(f"{argument}={name!r}: the table has the columns {', '.join(columns)}")
    if columns[texts] not in _TEXT:
        raise ValueError(
            f"texts={texts!r}: the column is of {columns[texts]}; accepted are {', '.join(_TEXT)}"
        )
    if output in columns:
        raise ValueError(f"output={output!r}: the table has a column of that name already")


class Embedder:
    """A model in a worker, and what it does to each batch.

    Args:
        model: a packed folder, which the workers of a machine share, or any model of sentence-transformers.
        texts: the column to be read.
        output: the column to be made: lists of float32 of one length; null where the text is.
        threads: of this worker.
    """

    def __init__(self, model: str, texts: str = "text", output: str = "embedding", threads: int = 1) -> None:
        from sentence_transformers import SentenceTransformer

        self.model = SentenceTransformer(model, device="cpu").eval()
        hf_cpu_accel.accelerate_for_cpu(self.model, originals="drop", threads=threads)
        self.texts, self.output, self.threads = texts, output, threads
        self.size: int = self.model.encode([""]).shape[-1]

    def __call__(self, table: pa.Table) -> pa.Table:
        """`table` with the new column behind the others."""
        import pyarrow as pa

        torch.set_num_threads(self.threads)  # counts for the thread that calls it, and Ray calls from others
        column = table.column(self.texts)
        there = column.is_valid().to_numpy()
        vectors = np.zeros((len(column), self.size), np.float32)
        if there.any():  # encode() sorts them by length, so that little is padded
            vectors[there] = self.model.encode(column.drop_null().to_pylist())
        values, absent = pa.array(vectors.reshape(-1)), pa.array(~there)
        made = pa.FixedSizeListArray.from_arrays(values, self.size, mask=absent)
        return table.append_column(self.output, made)
