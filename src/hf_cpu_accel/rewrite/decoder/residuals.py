"""Match how the branches of a decoder layer join its hidden states: the places of its norms, and the factors of the sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from torch import Tensor, nn

from hf_cpu_accel.check import row_error
from hf_cpu_accel.rewrite.decoder.head_norms import NormPart
from hf_cpu_accel.rewrite.norm.match import identify_bare_norm, identify_norm
from hf_cpu_accel.tolerance import TRACED


@dataclass(frozen=True)
class Branch:
    """The input of the first linear of attention, cross-attention or FFN, and the output of the last one."""

    input: Tensor
    output: Tensor


@dataclass(frozen=True)
class Residuals:
    """How input, attention, cross-attention and FFN become the output: fields of `DecoderParts`, explained in
    `ops.decoder_layers.DecoderLayer`."""

    ffn_norm: NormPart | None
    attention_post_norm: NormPart | None = None
    ffn_post_norm: NormPart | None = None
    attention_out_norm: NormPart | None = None
    ffn_out_norm: NormPart | None = None
    parallel: bool = False
    residual_scale: float = 1.0
    cross_norm: NormPart | None = None
    cross_out_norm: NormPart | None = None


class Norms:
    """The norms of a layer, and their outputs for tensors of its trace."""

    def __init__(self, layer: nn.Module, features: int) -> None:
        self.all: list[tuple[NormPart, nn.Module]] = []
        for path, module in layer.named_modules():
            spec = identify_norm(module) or identify_bare_norm(module, features)
            if spec is not None:
                self.all.append((NormPart(path, spec), module))

    def between(self, before: Tensor, after: Tensor) -> list[NormPart | None]:
        """Return the norms that map `before` to `after`; None is among them if the two are equal."""
        found: list[NormPart | None] = [] if differ(before, after) else [None]
        for part, module in self.all:
            made = _normed(part, module, before)
            if made is not None and not differ(made, after):
                found.append(part)
        return found

    def after(self, branch: Tensor) -> Iterator[tuple[NormPart | None, Tensor]]:
        """Yield each norm with its output for a branch's output, and None with the branch itself."""
        return ((_part(choice), _post(choice, branch)) for choice in self._over(branch))

    def lone_residuals(self, x: Tensor, attention: Branch, output: Tensor) -> Iterator[Residuals]:
        """Yield the ways to the output of a layer that has only attention."""
        for post in self._over(x):
            scale = _factor(output - x, _post(post, attention.output))
            if scale is not None:
                yield Residuals(None, _part(post), residual_scale=scale)

    def residuals(self, x: Tensor, attention: Branch, ffn: Branch, output: Tensor) -> Iterator[Residuals]:
        """Yield the ways from the layer's input x and the outputs of attention and FFN to the FFN's input and the layer's
        output."""
        choices = self._over(x)
        for post, ffn_post in product(choices, repeat=2):
            branch, ffn_branch = _post(post, attention.output), _post(ffn_post, ffn.output)
            scale = _factor(output - x, branch + ffn_branch)
            if scale is None:
                continue
            for parallel in (False, True):
                entering = x if parallel else x + scale * branch
                for norm in self.between(entering, ffn.input):
                    posts = _part(post), _part(ffn_post)
                    yield Residuals(norm, *posts, parallel=parallel, residual_scale=scale)
        for out, ffn_out in product(choices, repeat=2):
            if out is None and ffn_out is None:
                continue
            middle = _post(out, x + attention.output)
            if differ(_post(ffn_out, middle + ffn.output), output):
                continue
            for norm in self.between(middle, ffn.input):
                yield Residuals(norm, None, None, _part(out), _part(ffn_out))

    def crossing_residuals(
        self, x: Tensor, attention: Branch, cross: Branch, ffn: Branch, output: Tensor
    ) -> Iterator[Residuals]:
        """Yield the same with cross-attention in between: pre-norm (T5, Marian, Whisper) or post-norm (BART)."""
        choices = self._over(x)
        for out in choices:
            before = _post(out, x + attention.output)
            for cross_norm in self.between(before, cross.input):
                for cross_out in choices:
                    middle = _post(cross_out, before + cross.output)
                    for norm in self.between(middle, ffn.input):
                        for ffn_out in choices:
                            if not differ(_post(ffn_out, middle + ffn.output), output):
                                yield Residuals(
                                    norm,
                                    attention_out_norm=_part(out),
                                    ffn_out_norm=_part(ffn_out),
                                    cross_norm=cross_norm,
                                    cross_out_norm=_part(cross_out),
                                )

    def _over(self, hidden_states: Tensor) -> list[tuple[NormPart, nn.Module] | None]:
        fitting = [
            (part, module) for part, module in self.all if _normed(part, module, hidden_states) is not None
        ]
        return [None, *fitting]


def differ(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of a trace differ by more than rounding."""
    return row_error(one, other) > TRACED.float32


def _factor(target: Tensor, branch: Tensor) -> float | None:
    """Return the number that maps `branch` to `target`, or None."""
    factor = ((target * branch).sum() / branch.square().sum().clamp_min(1e-30)).item()
    if abs(factor - 1) < TRACED.float32:
        factor = 1.0
    return factor if abs(factor) > TRACED.float32 and not differ(factor * branch, target) else None


def _part(choice: tuple[NormPart, nn.Module] | None) -> NormPart | None:
    return None if choice is None else choice[0]


def _post(choice: tuple[NormPart, nn.Module] | None, branch: Tensor) -> Tensor:
    if choice is None:
        return branch
    made = _normed(*choice, branch)
    assert made is not None
    return made


def _normed(part: NormPart, module: nn.Module, input: Tensor) -> Tensor | None:
    """Return the output of the norm, or None if it has another number of features."""
    weight = module._parameters.get("weight")
    if weight is not None and weight.shape != input.shape[-1:]:
        return None
    return part.spec.reference(module, input)
