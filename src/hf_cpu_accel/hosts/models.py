"""Which modules are models of a host library: they are called on their own, too, wherever they hang."""

from __future__ import annotations

import sys

from torch import nn

# A library that was not imported has made none of the modules.
_BASES = (
    ("transformers.modeling_utils", "PreTrainedModel"),
    ("diffusers.models.modeling_utils", "ModelMixin"),
)


def is_model(module: nn.Module) -> bool:
    """Whether `module` is a `PreTrainedModel` of transformers or a `ModelMixin` of diffusers."""
    found = (getattr(sys.modules.get(file), name, None) for file, name in _BASES)
    return isinstance(module, tuple(base for base in found if base is not None))
