"""Trace the convolutions, poolings, norms, gates and sums of a module, from a call with a small image."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.lazy.lazy_tensor import ordinary
from hf_cpu_accel.packing.convolution import is_grouped
from hf_cpu_accel.rewrite.convolution.chain_parts import is_norm, parts_of
from hf_cpu_accel.rewrite.convolution.channel_moves import ChannelMoves
from hf_cpu_accel.rewrite.convolution.deferred import JOINS, DeferredConvolution, DeferringConvolution
from hf_cpu_accel.rewrite.convolution.epilogue import Epilogue
from hf_cpu_accel.rewrite.convolution.image_ops import (
    COMBINING,
    PRODUCTS,
    activation_of,
    is_mean,
    names_strides,
    zeros_around,
)
from hf_cpu_accel.rewrite.convolution.links import (
    AffineLink,
    AnyLink,
    Chain,
    CombineLink,
    Link,
    MeanLink,
    PoolingLink,
    Zeros,
    shorten_chain,
    zeros_of_same,
)
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign, ours
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.rewrite.core.verify import run
from hf_cpu_accel.runtime.torch_modes import AroundOps

# Dtypes of weights that `ops.convolutions` supports, the finest first.
DTYPES = ("float32", "bfloat16", "int8")
_SMALL = 9
# They stay odd and even when halved: zeros that depend on the size of an image differ.
_ODD_AND_EVEN = (33, 32)


def read(layer: nn.Module, image_of: Callable[[int], Tensor], *, fewest: int = 2) -> Chain | Refusal:
    """Return the chain of `layer`, from calls with a few images.

    Args:
        image_of: returns an image for the layer, of that height and width.
        fewest: minimum number of convolutions and poolings.
    """
    chain = _read(layer, image_of(_SMALL), fewest)
    if isinstance(chain, Refusal) or not any(isinstance(link, Link) and link.zeros for link in chain):
        return chain
    odd, even = (_read(layer, image_of(size), fewest) for size in _ODD_AND_EVEN)
    if isinstance(odd, Refusal) or isinstance(even, Refusal) or len(odd) != len(even):
        return Refusal("its operations change with the size of the image")
    return tuple(map(_reconciled, odd, even))


def _reconciled(link: AnyLink, other: AnyLink) -> AnyLink:
    """Return one link for the two that were traced on images of different sizes."""
    if not (isinstance(link, Link) and isinstance(other, Link)) or link.zeros is None or other.zeros is None:
        return link
    is_same = link.zeros.same and other.zeros.same and link.zeros != other.zeros
    return replace(link, zeros=replace(link.zeros, same=is_same))


def _read(layer: nn.Module, image: Tensor, fewest: int) -> Chain | Refusal:
    shadow = Shadow(layer)
    watched = shadow.module
    # Writes to the tensors of inference mode are not counted.
    with torch.inference_mode(False), shadow.running():
        image = image.clone()
        trace = _Trace([(image, image._version)])
        for path, module in parts_of(watched).items():
            _listen(trace, path, module)
        with AroundOps(partial(_watch, trace)):
            output = call_foreign(run, watched, image)
        if isinstance(output, Refusal):
            return output
        if trace.foreign:
            return Refusal("it has operations other than convolutions, poolings, norms, gates and sums")
        if trace.convolutions < fewest:
            return Refusal(f"it calls fewer than {fewest} convolutions and poolings")
        if not isinstance(output, Tensor) or not trace.is_last(output):
            return Refusal("another operation follows its last convolution")
    return shorten_chain(trace.links)


@dataclass
class _Trace:
    """The calls of the parts of a module for one image, and the ops between them.

    Attributes:
        images: the input and the outputs of the links, each with its version at that time; None for outputs that the module
            does not see.
        padded: images with zeros around them: the number of the image, and the zeros.
        moves: the moves of channels.
        same: tensors that equal an image, and its number.
        gates: numbers of images of one pixel, for any size of the input.
        foreign: whether a part read another tensor.
        is_inside: whether a part is computing.
    """

    images: list[tuple[Tensor | None, int]]
    links: list[AnyLink] = field(default_factory=list)
    padded: list[tuple[Tensor, int, Zeros]] = field(default_factory=list)
    same: list[tuple[Tensor, int]] = field(default_factory=list)
    gates: set[int] = field(default_factory=set)
    moves: ChannelMoves = field(default_factory=ChannelMoves)
    foreign: bool = False
    is_inside: bool = False

    @property
    def convolutions(self) -> int:
        return sum(isinstance(link, Link | PoolingLink) for link in self.links)

    def computed(self, path: str, convolution: Any, input: Tensor, epilogue: Epilogue) -> Tensor:
        with self._inside():
            output: Tensor = type(convolution).compute(convolution, input, epilogue)
        found, residual = self._source(input, convolution), None
        if epilogue.residual is not None:
            residual = self.number(epilogue.residual)
            self.foreign |= residual is None
        own = convolution.own_weight(normalized=epilogue.normalized)
        if found is None or own is None or own[0].dtype not in DTYPES:
            self.foreign = True
            return output
        source, zeros = found
        link = Link(path, source, residual, epilogue.normalized, epilogue.activation, zeros)
        if residual is not None and is_grouped(own[0].data):  # grouped convolutions add no residual
            self.add_link(None, replace(link, residual=None, activation="none"))
            sum = CombineLink(len(self.links), output.shape[1], residual, False, epilogue.activation)
            return self.add_link(output, sum)
        return self.add_link(output, link)

    def called(self, link: Callable[[int, int], AnyLink], part: nn.Module, input: Tensor) -> Tensor:
        """Record the call of a pooling or a norm; `link` creates its link from the number of an image and its channels."""
        input = ordinary(input)
        with self._inside():
            output: Tensor = type(part).forward(part, input)
        source = self.number(input)
        if source is None or input.dim() != 4:
            self.foreign = True
            return output
        return self.add_link(output, link(source, input.shape[1]))

    def done(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, writes: bool
    ) -> None:
        """Record an op if it may be a link; the output of an op that is not recorded must not be read.

        Args:
            writes: whether it wrote to its first argument, whose version counts that.
        """
        if self.moves.done(self, func, args, kwargs, output):
            return None
        if not isinstance(output, Tensor) or output.dim() != 4 or not args or not isinstance(args[0], Tensor):
            return
        if (zeros := zeros_around(func, args, kwargs)) is not None:
            return self._padded(args[0], zeros, output)
        source = self.number(args[0])
        if source is None:
            return
        channels, known = args[0].shape[1], len(self.images)
        if names_strides(func, args):
            self.images[source] = (args[0], args[0]._version + writes)
        elif is_mean(func, args, kwargs):
            self.add_link(output, MeanLink(source, channels))
        elif (activation := activation_of(func, args, kwargs)) is not None:
            self.add_link(output, CombineLink(source, channels, None, False, activation))
        elif func in COMBINING and len(args) == 2 and not kwargs and isinstance(args[1], Tensor):
            self._combined(func, source, args, output)
        if writes and self.images[-1][0] is output and len(self.images) > known:
            self.images[-1] = (output, output._version + 1)

    def number(self, image: Tensor) -> int | None:
        """Return the number of the image, if it is unchanged, or None."""
        known = (number for number, (tensor, _) in reversed(list(enumerate(self.images))) if tensor is image)
        number = next(known, None)
        if number is None:
            return next((of for same, of in self.same if same is image and image._version == 0), None)
        return None if image._version != self.images[number][1] else number

    def add_copy(self, image: Tensor, source: int) -> None:
        """Record that `image` is image `source` again."""
        self.same.append((image, source))

    def is_last(self, output: Tensor) -> bool:
        """Return whether `output` is the output of the last link, and neither it nor the input was written to."""
        input = self.images[0][0]
        assert input is not None
        return self.number(output) == len(self.images) - 1 and self.number(input) == 0

    def _combined(self, func: Any, source: int, args: tuple[Any, ...], output: Tensor) -> None:
        other = self.number(args[1])
        if other is None or other == source:
            return
        first, second = args[:2]
        if source in self.gates and other not in self.gates and not func._schema.is_mutable:
            source, other, first, second = other, source, second, first
        fits = first.shape[:2] == second.shape[:2] and output.shape == first.shape
        if fits and (second.shape == first.shape or tuple(second.shape[2:]) == (1, 1)):
            product = func in PRODUCTS
            self.add_link(output, CombineLink(source, first.shape[1], other, product, "none"))

    def _padded(self, image: Tensor, zeros: Zeros, output: Tensor) -> None:
        source = self.number(image)
        if source is not None:
            self.padded.append((output, source, zeros))

    def _source(self, input: Tensor, convolution: Any) -> tuple[int, Zeros | None] | None:
        """Return the number of the image that a convolution reads, and the zeros around it, or None."""
        for padded, source, zeros in self.padded:
            if padded is not input or padded._version != 0:
                continue
            image = self.images[source][0]
            assert image is not None
            same = zeros_of_same(image, convolution)
            if not any(convolution.padding) and replace(zeros, same=True) == same:
                return source, same
            fits = zeros.bottom >= zeros.top and zeros.right >= zeros.left
            return (source, zeros) if fits else None
        number = self.number(input)
        return None if number is None else (number, None)

    def add_link(self, output: Tensor | None, link: AnyLink) -> Any:
        """Record the image that a link creates."""
        self.links.append(link)
        if isinstance(link, MeanLink) or (
            link.source in self.gates and (getattr(link, "residual", None) in (None, *self.gates))
        ):
            self.gates.add(len(self.images))
        self.images.append((output, 0 if output is None else output._version))
        return output

    @contextmanager
    def _inside(self) -> Any:
        before, self.is_inside = self.is_inside, True
        try:
            yield
        finally:
            self.is_inside = before


def _watch(trace: _Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op and report it to `trace`, unless a part is running. A convolution is computed if the op cannot join it."""
    if trace.is_inside:
        return func(*args, **kwargs)
    waiting = any(isinstance(arg, DeferredConvolution) for arg in args)
    if waiting and func in JOINS:
        joined = JOINS[func](args, kwargs)
        if joined is not None:
            return joined
    args = tuple(map(_computed, args))
    output = func(*args, **kwargs)
    with ours():
        writes = func._schema.is_mutable and not waiting  # its version is counted after this
        trace.done(func, args, kwargs, output, writes)
    return output


def _computed(arg: Any) -> Any:
    if isinstance(arg, list | tuple):  # concatenated images
        return [_computed(part) for part in arg]
    return arg.tensor if isinstance(arg, DeferredConvolution) else arg


def _listen(trace: _Trace, path: str, module: nn.Module) -> None:
    """Report the calls of `module`, a module of a shadow, to `trace`."""

    def compute(input: Tensor, epilogue: Epilogue) -> Tensor:
        return trace.computed(path, module, input, epilogue)

    link = partial(AffineLink if is_norm(module) else PoolingLink, path)

    def forward(input: Tensor) -> Tensor:
        return trace.called(link, module, input)

    listening: dict[str, Callable[..., Tensor]] = (
        {"compute": compute} if isinstance(module, DeferringConvolution) else {"forward": forward}
    )
    vars(module).update(listening)
