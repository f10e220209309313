"""What is made of a row that an encoder gave: a vector of length one or of fewer dimensions, or probabilities."""

from __future__ import annotations

import numpy as np

from hf_cpu_accel.serve.encoders.encoder import Row
from hf_cpu_accel.serve.limits import BadInput


def normalized(row: Row) -> Row:
    """Divided by its Euclidean length; a row of zeros stays as it is."""
    length = float(np.linalg.norm(row))
    return row / np.float32(length) if length > 0 else row


def shortened(row: Row, dimensions: int | None) -> Row:
    """The first `dimensions` numbers, as models with Matryoshka embeddings are made for.

    Raises:
        BadInput: the row has fewer.
    """
    if dimensions is None:
        return row
    if not 1 <= dimensions <= len(row):
        raise BadInput(f"dimensions={dimensions}: the model has {len(row)}")
    return row[:dimensions]


def probabilities(logits: Row, multi_label: bool) -> Row:
    """Of one label or of several that can hold at once by the sigmoid, else by softmax."""
    if multi_label or len(logits) == 1:
        return np.asarray(1 / (1 + np.exp(-logits.astype(np.float64))), dtype=np.float32)
    exponentials = np.exp(logits - logits.max())
    return exponentials / exponentials.sum()
