"""The agreement of two systems' outputs: the worst cosine of a row and the largest relative error, in float64.

One cosine over a flattened tensor would hide a few wrong rows and a wrong scale.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hf_cpu_accel import check
from hf_cpu_accel.check import Agreement


def compare(output: Sequence[Tensor], reference: Sequence[Tensor]) -> Agreement:
    """Compare two lists of output tensors of equal shapes, in any float dtype.

    A non-finite value in `output` gives cosine -1 and an infinite error.

    Raises:
        ValueError: the lists differ in length or shapes or are empty, or the reference is not finite.
    """
    return check.compare(list(output), list(reference)).agreement
