"""From what the user has to the modules to accelerate."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import nn


@dataclass(frozen=True)
class Root:
    """A model to accelerate.

    Attributes:
        module: the model.
        host: the library that it comes from, `"transformers"`, `"diffusers"`, `"sentence_transformers"`, `"pyg"` or `"torch"`.
        deciding: the modules whose `training` flags tell whether the model is in training mode.
        name: what the target calls it, if it has several models (`"unet"`); the paths of its modules begin with that.
        adds_in_training: whether the host leaves what it puts into a model (adapters, processors) in training mode.
    """

    module: nn.Module
    host: str
    deciding: tuple[nn.Module, ...]
    name: str = ""
    adds_in_training: bool = False

    @property
    def trains(self) -> bool:
        """Whether the model is to be trained while it is accelerated: then nothing is packed or frozen."""
        return not self.deciding and self.module.training


# Host library -> our file for it. A file is imported only if its library has been: a target cannot come from any other.
_HOSTS = {
    "hf_cpu_accel.frontends.optimum": "hf_cpu_accel.frontends.optimum",
    "sentence_transformers": "hf_cpu_accel.hosts.sentence_transformers",
    "transformers": "hf_cpu_accel.hosts.transformers",
    "diffusers.models.modeling_utils": "hf_cpu_accel.hosts.diffusers",
    "torch_geometric": "hf_cpu_accel.hosts.pyg",
}
ACCEPTED = (
    "a transformers Pipeline or PreTrainedModel, a diffusers DiffusionPipeline or ModelMixin, a SentenceTransformer, "
    "or any torch.nn.Module"
)


def find(target: object) -> tuple[Root, ...]:
    """The models in `target`.

    Raises:
        TypeError: `target` is nothing that can be accelerated.
    """
    if isinstance(target, torch.jit.ScriptModule):
        raise TypeError(
            "target is compiled by TorchScript, which runs what it was then; "
            "accepted: the module from before torch.jit.script or torch.jit.trace"
        )
    for host, frontend in _HOSTS.items():
        if host in sys.modules:
            roots: tuple[Root, ...] | None = import_module(frontend).roots(target)
            if roots is not None:
                return roots
    if isinstance(target, nn.Module):
        return (Root(target, "torch", (target,)),)
    raise TypeError(f"target is {_describe(target)}; accepted: {ACCEPTED}")


def _describe(target: object) -> str:
    if isinstance(target, type):
        return f"the class {target.__name__}, not an instance of it"
    return f"a {type(target).__name__}"
