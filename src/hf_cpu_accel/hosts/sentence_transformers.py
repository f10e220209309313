"""`SentenceTransformer`, a Sequential of a transformers model, pooling and more."""

from __future__ import annotations

from sentence_transformers import SentenceTransformer
from transformers import PreTrainedModel

from hf_cpu_accel.hosts.find import Root


def roots(target: object) -> tuple[Root, ...] | None:
    """The whole of it; None if `target` is no SentenceTransformer.

    A SentenceTransformer puts itself in eval mode only when it encodes, so the flags of its models decide.
    """
    if not isinstance(target, SentenceTransformer):
        return None
    models = tuple(module for module in target.modules() if isinstance(module, PreTrainedModel))
    return (Root(target, "sentence_transformers", models or (target,)),)
