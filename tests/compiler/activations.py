"""Activations as models spell them, each of which ends up in the epilogue of a product."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [
    F.gelu,
    lambda x: F.gelu(x, approximate="tanh"),
    lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))),
    lambda x: x * torch.sigmoid(1.702 * x),
    F.relu,
    F.silu,
    torch.tanh,
]
