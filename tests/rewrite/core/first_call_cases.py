"""Models with one call each, and the parts that wait for a first call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.generate.cache import CPUCache
from hf_cpu_accel.patching.fused_module import FusedModuleMixin
from hf_cpu_accel.rewrite.core.first_call import FirstCall
from tests.rewrite.decoder.decoder_families import DECODERS
from tests.rewrite.encoder_families import bert, dinov2, modernbert, t5, vit

IDS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "bert": (bert, IDS),
    "t5 encoder": (t5, IDS),
    "modernbert": (modernbert, IDS),
    "vit": (vit, PIXELS),
    "dinov2": (lambda: dinov2(0.5), PIXELS),
    **{name: (DECODERS[name].build, IDS) for name in ("llama", "gpt2", "phi", "mixtral", "gemma2")},
}


def output(model: nn.Module, call: Any, *, with_cache: bool = False, **more: Any) -> Tensor:
    if with_cache:
        more["past_key_values"] = CPUCache(model.config)
    elif hasattr(model, "lm_head"):
        more["use_cache"] = False
    with torch.no_grad():
        return next(v for v in model(call, **more).values() if isinstance(v, Tensor)) + 0


def pending_checks(model: nn.Module) -> int:
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    return sum(isinstance(getattr(hook, "__self__", None), FirstCall) for hook in hooks)


def parts_of(model: nn.Module) -> Iterator[tuple[str, FusedModuleMixin]]:
    for path, module in model.named_modules():
        if isinstance(module, FusedModuleMixin):
            yield path, module
