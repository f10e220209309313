"""Postprocess the rows of an encoder: normalize or shorten an embedding, or convert logits to probabilities."""

from __future__ import annotations

import numpy as np

from hf_cpu_accel.serve.encoders.encoder import Row
from hf_cpu_accel.serve.limits import BadInput


def normalize(row: Row) -> Row:
    """Divide a row by its Euclidean length; a row of zeros stays unchanged."""
    length = float(np.linalg.norm(row))
    return row / np.float32(length) if length > 0 else row


def shorten(row: Row, dimensions: int | None) -> Row:
    """Return the first `dimensions` numbers, which Matryoshka embeddings are trained for; None returns the row.

    Raises:
        BadInput: `dimensions` is less than 1 or more than the row has.
    """
    if dimensions is None:
        return row
    if not 1 <= dimensions <= len(row):
        raise BadInput(
            f"dimensions={dimensions} is not supported by this model; accepted are 1 to {len(row)}"
        )
    return row[:dimensions]


def probabilities(logits: Row, multi_label: bool) -> Row:
    """Return probabilities: the sigmoid for one label or for multi-label models, or else the softmax."""
    if multi_label or len(logits) == 1:
        return np.asarray(1 / (1 + np.exp(-logits.astype(np.float64))), dtype=np.float32)
    exponentials = np.exp(logits - logits.max())
    return exponentials / exponentials.sum()
