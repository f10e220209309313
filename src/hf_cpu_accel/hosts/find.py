"""The models in a target of `accelerate_for_cpu`."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn

from hf_cpu_accel.hosts import diffusers, pyg, sentence_transformers, transformers
from hf_cpu_accel.hosts.root import Root

__all__ = ["ACCEPTED", "Root", "find"]

_OPTIMUM = "hf_cpu_accel.frontends.optimum"  # imported only if its classes are used
# Encoders of sentence-transformers hold models of transformers, so these come after them.
_HOSTS: tuple[Callable[[object], tuple[Root, ...] | None], ...] = (
    sentence_transformers.roots,
    transformers.roots,
    diffusers.roots,
    pyg.roots,
)
ACCEPTED = (
    "a transformers Pipeline or PreTrainedModel, a diffusers DiffusionPipeline or ModelMixin, a SentenceTransformer, "
    "or any torch.nn.Module"
)


def find(target: object) -> tuple[Root, ...]:
    """Return the models in `target`; no host library is imported.

    Raises:
        TypeError: `target` cannot be accelerated.
    """
    if isinstance(target, torch.jit.ScriptModule):
        raise TypeError(
            "target is compiled by TorchScript and cannot be changed; "
            "pass the module as it was before torch.jit.script or torch.jit.trace"
        )
    optimum = sys.modules.get(_OPTIMUM)
    for roots_of in _HOSTS if optimum is None else (optimum.roots, *_HOSTS):
        roots = roots_of(target)
        if roots is not None:
            return roots
    if isinstance(target, nn.Module):
        return (Root(target, "torch", (target,)),)
    raise TypeError(f"target is {_describe(target)}; expected {ACCEPTED}")


def _describe(target: object) -> str:
    if isinstance(target, type):
        return f"the class {target.__name__}, not an instance of it"
    return f"a {type(target).__name__}"
