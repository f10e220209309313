"""Which convolutions and poolings a module is made of, read from what they are asked to compute when it is run on a small image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.ops.convolution_chain import ConvolutionStep, PoolingStep
from hf_cpu_accel.patching.hooks import own_forward
from hf_cpu_accel.rewrite.convolution.deferred import DeferringConvolution
from hf_cpu_accel.rewrite.convolution.epilogue import Epilogue
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.rewrite.core.verify import run

# Of weights that `ops.convolutions` takes, from the finest on.
DTYPES = ("float32", "bfloat16", "int8")


@dataclass(frozen=True)
class Link:
    """One convolution of a chain.

    Attributes:
        path: where it is in the module.
        source, residual: numbers of images: 0 is the module's input, i + 1 the output of link i.
        normalised, activation: see `Epilogue`.
    """

    path: str
    source: int
    residual: int | None
    normalised: bool
    activation: str

    def step(self, root: nn.Module) -> ConvolutionStep:
        """What it is in the module now."""
        convolution: Any = root.get_submodule(self.path)
        weight, bias = convolution.own_weight(normalised=self.normalised)
        return ConvolutionStep(
            weight=weight,
            bias=bias,
            source=self.source,
            residual=self.residual,
            kernel_size=convolution.kernel_size,
            stride=convolution.stride,
            padding=convolution.padding,
            dilation=convolution.dilation,
            activation=self.activation,
        )

    def compute(self, root: nn.Module, images: Sequence[Tensor]) -> Tensor:
        """What it makes of the images before it."""
        convolution: Any = root.get_submodule(self.path)
        residual = None if self.residual is None else images[self.residual]
        return convolution.compute(images[self.source], Epilogue(self.normalised, residual, self.activation))


@dataclass(frozen=True)
class PoolingLink:
    """A max pooling in a chain; see `Link`.

    Attributes:
        channels: of the image.
    """

    path: str
    source: int
    channels: int

    def step(self, root: nn.Module) -> PoolingStep:
        pooling: Any = root.get_submodule(self.path)
        windows = (_pair(pooling.kernel_size), _pair(pooling.stride), _pair(pooling.padding))
        return PoolingStep(self.source, self.channels, *windows)

    def compute(self, root: nn.Module, images: Sequence[Tensor]) -> Tensor:
        """What it makes of the images before it."""
        return root.get_submodule(self.path)(images[self.source])


Chain = tuple[Link | PoolingLink, ...]


def parts_of(layer: nn.Module) -> dict[str, nn.Module]:
    """The modules in `layer` that may be links of a chain, by path."""
    return {path: part for path, part in layer.named_modules() if is_part(part)}


def is_part(module: nn.Module) -> bool:
    """Whether that may be a link of a chain: a convolution, or a pooling as the op has it, whose forward was not replaced."""
    if isinstance(module, DeferringConvolution):
        return True
    if type(module) is not nn.MaxPool2d or own_forward(module) is not None:
        return False
    return not (module.ceil_mode or module.return_indices) and _pair(module.dilation) == (1, 1)


def read(layer: nn.Module, image: Tensor) -> Chain | Refusal:
    """The chain that `layer` is, as far as one image shows."""
    shadow = Shadow(layer)
    watched = shadow.module
    # Writes to the tensors of inference mode are not counted.
    with torch.inference_mode(False), shadow.running():
        image = image.clone()
        trace = _Trace([(image, image._version)])
        for path, module in parts_of(watched).items():
            _listen(trace, path, module)
        output = call_foreign(run, watched, image)
        if isinstance(output, Refusal):
            return output
        if trace.foreign:
            return Refusal("what its convolutions read is not all made by convolutions, poolings and sums")
        if len(trace.links) < 2:
            return Refusal("it calls fewer than two convolutions and poolings")
        if not isinstance(output, Tensor) or not trace.is_last(output):
            return Refusal("something else comes after its last convolution")
    return tuple(trace.links)


@dataclass
class _Trace:
    """What the parts of a module are asked for while it is given an image.

    Attributes:
        images: the input, and then what each of them made, and how often each had been written to by then.
        foreign: whether one of them read something else.
    """

    images: list[tuple[Tensor, int]]
    links: list[Link | PoolingLink] = field(default_factory=list)
    foreign: bool = False

    def computed(self, path: str, convolution: Any, input: Tensor, epilogue: Epilogue) -> Tensor:
        source, residual = self._number(input), None
        if epilogue.residual is not None:
            residual = self._number(epilogue.residual)
            self.foreign |= residual is None
        own = convolution.own_weight(normalised=epilogue.normalised)
        if source is None or own is None or own[0].dtype not in DTYPES:
            self.foreign = True
        else:
            self.links.append(Link(path, source, residual, epilogue.normalised, epilogue.activation))
        return self._made(type(convolution).compute(convolution, input, epilogue))

    def pooled(self, path: str, pooling: nn.Module, input: Tensor) -> Tensor:
        input = input.tensor if isinstance(input, LazyTensor) else input
        source = self._number(input)
        if source is None or input.dim() != 4:
            self.foreign = True
        else:
            self.links.append(PoolingLink(path, source, input.shape[1]))
        return self._made(type(pooling).forward(pooling, input))

    def is_last(self, output: Tensor) -> bool:
        """Whether that is what the last of them made, and neither it nor the input was written to."""
        return self._number(output) == len(self.images) - 1 and self._number(self.images[0][0]) == 0

    def _made(self, output: Tensor) -> Tensor:
        self.images.append((output, output._version))
        return output

    def _number(self, image: Tensor) -> int | None:
        """Which image that is, as it was made."""
        known = (number for number, (tensor, _) in enumerate(self.images) if tensor is image)
        number = next(known, None)
        return None if number is None or image._version != self.images[number][1] else number


def _listen(trace: _Trace, path: str, module: nn.Module) -> None:
    """Have `trace` told what `module`, of a shadow, is asked for."""

    def compute(input: Tensor, epilogue: Epilogue) -> Tensor:
        return trace.computed(path, module, input, epilogue)

    def forward(input: Tensor) -> Tensor:
        return trace.pooled(path, module, input)

    if isinstance(module, DeferringConvolution):
        vars(module)["compute"] = compute
    else:
        vars(module)["forward"] = forward


def _pair(sizes: int | tuple[int, ...]) -> tuple[int, int]:
    sides = (sizes,) if isinstance(sizes, int) else sizes
    return sides[0], sides[-1]  # torch takes one number in a tuple, too
