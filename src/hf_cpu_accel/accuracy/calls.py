"""`Call`: one call of a model, made again and again while its dtypes are chosen."""

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
    """One call of a model; the same in every repetition, also of a model that draws random numbers."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str = "accuracy: the built-in example"

    def __call__(self, model: nn.Module) -> Any:
        # Hosts write into the mapping that they are given.
        args = [dict(arg) if isinstance(arg, Mapping) else arg for arg in self.args]
        with torch.no_grad(), deciding_nothing(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return model(*args, **self.kwargs)

    def first(self, model: nn.Module) -> Any:
        """The call of the model as it was made.

        Raises:
            ValueError: it does not take the example.
        """
        output = call_foreign(self, model)
        if isinstance(output, Refusal):
            raise ValueError(f"{self.name}: {type(model).__name__} does not take it: {output.reason}")
        return output

    @property
    def mask(self) -> Tensor | None:
        """[B, L], where there are tokens."""
        given = self.args[0] if self.args and isinstance(self.args[0], Mapping) else self.kwargs
        mask = given.get("attention_mask")
        return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def named_call(model: nn.Module, inputs: Mapping[str, Any], name: str) -> Call:
    """With `inputs` by their names; models that would keep keys and values for a next call are told not to."""
    keeps = "use_cache" in inspect.signature(model.forward).parameters
    return Call((), {**({"use_cache": False} if keeps else {}), **inputs}, name)
