"""Modules that are models of a host library, which are also called directly when they are inside other modules."""

from __future__ import annotations

from torch import nn

from hf_cpu_accel.hosts.loaded import loaded


def is_model(module: object) -> bool:
    """Return whether `module` is a `PreTrainedModel` of transformers or a `ModelMixin` of diffusers."""
    return is_transformers_model(module) or isinstance(module, model_mixins())


def is_transformers_model(module: object) -> bool:
    """Return whether `module` is a `PreTrainedModel`."""
    return isinstance(module, pretrained_models())


def pretrained_models() -> tuple[type[nn.Module], ...]:
    """Return `PreTrainedModel` of transformers, for `isinstance`; nothing where no model of it can exist."""
    return loaded("transformers.modeling_utils", "PreTrainedModel")


def model_mixins() -> tuple[type[nn.Module], ...]:
    """Return `ModelMixin` of diffusers, for `isinstance`; nothing where no model of it can exist."""
    return loaded("diffusers.models.modeling_utils", "ModelMixin")
