"""`Call`: one call of a model, which is repeated while its dtypes are chosen."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.providers.route import deciding_nothing
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.refusal import Refusal


@dataclass(frozen=True)
class Call:
    """One call of a model. Repetitions are identical, also for models that use random numbers.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
        name: name of the example, for messages.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str = "accuracy: the built-in example"

    def __call__(self, model: nn.Module) -> Any:
        # Hosts may change the mappings that they get.
        args = [dict(arg) if isinstance(arg, Mapping) else arg for arg in self.args]
        with torch.no_grad(), deciding_nothing(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return model(*args, **self.kwargs)

    def first(self, model: nn.Module) -> Any:
        """Call the original model.

        Raises:
            ValueError: the model does not accept the example.
        """
        output = call_foreign(self, model)
        if isinstance(output, Refusal):
            raise ValueError(
                f"{self.name} is not accepted by {type(model).__name__}: {output.reason}; pass other examples=[...]"
            )
        return output

    @property
    def mask(self) -> Tensor | None:
        """Return the attention mask [B, L], or None."""
        inputs = self.args[0] if self.args and isinstance(self.args[0], Mapping) else self.kwargs
        mask = inputs.get("attention_mask")
        return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def named_call(model: nn.Module, inputs: Mapping[str, Any], name: str) -> Call:
    """Return the call of a model with `inputs` as keyword arguments, without a KV cache."""
    has_cache = "use_cache" in inspect.signature(model.forward).parameters
    return Call((), {**({"use_cache": False} if has_cache else {}), **inputs}, name)
