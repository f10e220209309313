"""The Snake activations of audio codecs and vocoders (DAC, Stable Audio, BigVGAN): one pass over memory instead of five."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import row_error
from hf_cpu_accel.lazy.lazy_tensor import ordinary
from hf_cpu_accel.ops.snake import snake
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, fused_layer
from hf_cpu_accel.patching.hooks import is_plain
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.convolution.sound import has_channels_last
from hf_cpu_accel.rewrite.core.context import WEIGHT_DTYPES, Context
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.fuse_each import refusal_to_fuse
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.runtime.tracing import is_tracing
from hf_cpu_accel.tolerance import EXACT

STRUCTURE = "snake"
_EPS = 1e-9  # in all hosts


@dataclass(frozen=True)
class Form:
    """The mapping from parameters of a module to arguments of the op.

    Attributes:
        divisor: the name of the parameter that the squared sine is divided by.
        in_logarithms: whether parameters are logarithms.
    """

    divisor: str
    in_logarithms: bool

    def numbers(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """Return alpha and scale, float32 [C] each."""
        alpha, divisor = self._read(module, "alpha"), self._read(module, self.divisor)
        return alpha.contiguous(), (divisor + _EPS).reciprocal()

    def _read(self, module: nn.Module, name: str) -> Tensor:
        parameter = module._parameters[name]
        assert parameter is not None
        values = parameter.detach().flatten().float()
        return values.exp() if self.in_logarithms else values


class FusedSnake(FusedModuleMixin):
    """Mixed into a Snake activation of audio [B, C, L], with channels first or last in memory."""

    _form: Form

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self._run_fused(args[0]) if len(args) == 1 and not kwargs and not is_tracing() else None
        return self._original_class.forward(self, *args, **kwargs) if output is None else output

    def _run_fused(self, sound: Tensor) -> Tensor | None:
        check_inference(self, sound)
        sound = ordinary(sound)
        if sound.dtype not in WEIGHT_DTYPES or sound.dim() != 3 or self._promotes(sound):
            return None
        alpha, scale = self._form.numbers(self)  # in each call, as weights may be edited
        if sound.shape[1] != len(alpha):
            return None
        if sound.is_contiguous():
            return snake(sound, alpha, scale)
        if has_channels_last(sound):
            return snake(sound.transpose(1, 2), alpha, scale, channels_last=True).transpose(1, 2)
        return None

    def _promotes(self, sound: Tensor) -> bool:
        """Return whether the own forward returns another dtype than that of `sound`."""
        return any(torch.result_type(sound, parameter) != sound.dtype for parameter in self.parameters())


class SnakeRule:
    """Activations x + sin(alpha x)^2 / beta, with any parametrization of alpha and beta."""

    name = STRUCTURE

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        names = set(module._parameters)
        if names not in ({"alpha"}, {"alpha", "beta"}) or module._modules or module._buffers:
            return None
        parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
        if len(parameters) != len(names) or not is_plain(module):
            return None
        channels = max(parameters[0].shape, default=1)
        if any(p.numel() != channels or p.dtype not in WEIGHT_DTYPES for p in parameters):
            return None
        if refusal_to_fuse(module, path, context) is not None:
            return None
        form = next((form for form in _forms(names) if _error(module, form, channels) <= EXACT), None)
        return None if form is None else Match(module, path, form)

    def apply(self, match: Match, context: Context) -> Outcome:
        fused = fused_layer(FusedSnake, match.module, _form=match.data)
        context.swap(match.module, fused)
        item = PlanItem(match.path, STRUCTURE, "snake", "float32", packed_bytes=0, reason=None)
        return Outcome((item,), (match.module,))


def _forms(names: set[str]) -> Iterator[Form]:
    for divisor, in_logarithms in product(sorted(names, reverse=True), (False, True)):
        yield Form(divisor, in_logarithms)


def _error(module: nn.Module, form: Form, channels: int) -> float:
    """Return the largest error of copies with random parameters, of both signs and all sizes, and of one with the current ones."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    sizes = torch.logspace(-3, 0.5, channels, dtype=torch.float32)
    drawings: list[dict[str, Tensor]] = [
        {name: (drawn(channels) * sizes).view(p.shape) for name, p in module.named_parameters()},
        {name: (drawn(channels) * 3).view(p.shape) for name, p in module.named_parameters()},
        {name: p.detach().float() for name, p in module.named_parameters()},
    ]
    worst = 0.0
    for values in drawings:
        shadow = Shadow(module)
        for name, value in values.items():
            shadow.module._parameters[name] = nn.Parameter(value, requires_grad=False)
        sound = drawn(2, channels, 17)
        with torch.no_grad(), shadow.running():
            expected = call_foreign(shadow.module, sound)
            if not isinstance(expected, Tensor) or expected.shape != sound.shape:
                return float("inf")
            worst = max(worst, row_error(snake(sound, *form.numbers(shadow.module)), expected))
    return worst
