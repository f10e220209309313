"""Level two for networks of convolutions: a residual block (He et al. 2015, arXiv:1512.03385), or a whole stage, in one call.

Which convolution reads what, and what joins it, is not guessed from classes or names: a module is run on a small image, and what
its convolutions were asked to compute is all that it does if its output is the last of theirs. The chain is then proved on others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.ops.convolutions import BoundConvolutions, ConvolutionStep, bind, convolutions
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.changes import swap_module
from hf_cpu_accel.rewrite.context import WEIGHT_DTYPES, Context, refusal_to_swap
from hf_cpu_accel.rewrite.epilogue import Epilogue
from hf_cpu_accel.rewrite.folded_norm import FoldedNorm
from hf_cpu_accel.rewrite.lazy_tensor import LazyTensor
from hf_cpu_accel.rewrite.mixed_class import Mixed, fused_layer
from hf_cpu_accel.rewrite.packed_module import PackedModule, check_inference
from hf_cpu_accel.rewrite.pending_convolution import WaitingConvolution
from hf_cpu_accel.rewrite.verify import row_error, run_alone

STRUCTURE = "residual blocks"
# Worst pixel of an image, after up to twenty convolutions: the same packed weights, but what passes between them is rounded to
# bfloat16 where they are narrow, and one step of a quantised input beside another changes what comes after.
_TOLERANCES = {"float32": 1e-3, "bfloat16": 6e-2, "int8": 0.15}
# [batch, height, width]: for reading, and for the proof.
_IMAGE = (1, 9, 9)
_OTHERS = ((2, 13, 10), (1, 32, 33))


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


class FusedResidualBlock(Mixed):
    """Mixed into the module's own class: [N, C, H, W] -> [N, C', H', W'], channels last.

    The children, hooks and attributes are those of the original, whose own forward it runs where somebody looks at what is inside,
    for other arguments, and while a graph is traced.
    """

    _chain: tuple[Link, ...]
    _bound: BoundConvolutions | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        image = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(image, Tensor) or not self._takes(image) or self.is_watched:
            return self._original_class.forward(self, *args, **kwargs)
        check_inference(self, image)
        image = image.tensor if isinstance(image, LazyTensor) else image
        return convolutions(image, self._bound or self._bind())

    def _takes(self, image: Tensor) -> bool:
        return image.dim() == 4 and image.dtype in WEIGHT_DTYPES and not torch.compiler.is_compiling()

    def _bind(self) -> BoundConvolutions:
        steps = []
        narrow = False
        for link in self._chain:
            convolution: Any = self.get_submodule(link.path)
            weight, bias = convolution.own_weight(normalised=link.normalised)
            steps.append(
                ConvolutionStep(
                    weight=weight,
                    bias=bias,
                    source=link.source,
                    residual=link.residual,
                    kernel_size=convolution.kernel_size,
                    stride=convolution.stride,
                    padding=_pair_of_numbers(convolution.padding),
                    dilation=convolution.dilation,
                    activation=link.activation,
                )
            )
            narrow |= weight.dtype != "float32"
        self._bound = bind(steps, narrow=narrow)
        return self._bound

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedResidualBlock:
        super()._apply(fn, recurse)
        self._bound = None  # holds the biases
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bound": None}


def fuse_residual_blocks(context: Context) -> list[PlanItem]:
    """Fuse the largest modules of the model that are such chains. To be called when convolutions are packed."""
    items: list[PlanItem] = []
    inside: set[int] = set()  # modules of a chain that is fused already
    for path, layer in list(context.root.named_modules()):
        if id(layer) in inside or not _may_be_chain(layer) or not context.slots[id(layer)]:
            continue
        if refusal_to_swap(layer, path, context) is not None:
            continue
        chain = _read(layer)
        if chain is None:
            continue
        fused = fused_layer(FusedResidualBlock, layer, _chain=chain, _bound=None)
        dtype = _weights(layer, chain)
        if _agree(fused, layer, dtype):
            inside.update(id(module) for module in layer.modules())
            swap_module(context.journal, context.slots[id(layer)], fused)
            items.append(PlanItem(path, STRUCTURE, "convolutions", dtype, packed_bytes=0, reason=None))
    return items


def _may_be_chain(layer: nn.Module) -> bool:
    """Two convolutions by our kernels at least, and else only what has no state of its own."""
    if isinstance(layer, PackedModule | FoldedNorm | FusedResidualBlock):
        return False
    own = 0
    for module in layer.modules():
        if isinstance(module, WaitingConvolution):
            own += 1
        elif not isinstance(module, FoldedNorm) and (module._parameters or module._buffers):
            return False
    return own > 1


@dataclass
class _Trace:
    """What the convolutions in a module are asked for while it is given an image.

    Attributes:
        images: the input, and then what each of them made.
        foreign: whether one of them read something else.
    """

    images: list[Tensor]
    links: list[Link] = field(default_factory=list)
    foreign: bool = False

    def computed(self, path: str, convolution: Any, input: Tensor, epilogue: Epilogue) -> Tensor:
        source, residual = self._number(input), None
        if epilogue.residual is not None:
            residual = self._number(epilogue.residual)
            self.foreign |= residual is None
        own = convolution.own_weight(normalised=epilogue.normalised) is not None
        if source is None or not own:
            self.foreign = True
        else:
            self.links.append(Link(path, source, residual, epilogue.normalised, epilogue.activation))
        output: Tensor = type(convolution).compute(convolution, input, epilogue)
        self.images.append(output)
        return output

    def _number(self, image: Tensor) -> int | None:
        return next((number for number, known in enumerate(self.images) if known is image), None)


def _read(layer: nn.Module) -> tuple[Link, ...] | None:
    """The chain that `layer` is, as far as one image shows."""
    trace = _Trace([_image(layer, *_IMAGE)])
    with ExitStack() as wrapped:
        for path, module in layer.named_modules():
            if isinstance(module, WaitingConvolution):
                _listen(trace, path, module, wrapped)
        output = run_alone(layer, trace.images[0])
    if output is None or trace.foreign or len(trace.links) < 2 or output is not trace.images[-1]:
        return None
    return tuple(trace.links)


def _listen(trace: _Trace, path: str, module: nn.Module, wrapped: ExitStack) -> None:
    def compute(input: Tensor, epilogue: Epilogue) -> Tensor:
        return trace.computed(path, module, input, epilogue)

    vars(module)["compute"] = compute
    wrapped.callback(vars(module).pop, "compute")


def _agree(fused: nn.Module, layer: nn.Module, dtype: str) -> bool:
    """Whether the chain gives what the layer gives for other images, in batches, too."""
    for sizes in _OTHERS:
        ours, theirs = (run_alone(module, _image(layer, *sizes)) for module in (fused, layer))
        if ours is None or theirs is None:
            return False
        if row_error(ours.movedim(1, -1), theirs.movedim(1, -1)) > _TOLERANCES[dtype]:
            return False
    return True


def _weights(layer: nn.Module, chain: tuple[Link, ...]) -> str:
    """The dtype of the weights, the coarsest where they differ."""
    dtypes = {layer.get_submodule(link.path).packed_dtype for link in chain}
    return next(dtype for dtype in reversed(_TOLERANCES) if dtype in dtypes)


def _image(layer: nn.Module, batch: int, height: int, width: int) -> Tensor:
    first: Any = next(module for module in layer.modules() if isinstance(module, WaitingConvolution))
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, first.in_channels, height, width, generator=generator).to(first.weight_dtype)


def _pair_of_numbers(padding: Any) -> tuple[int, int]:
    return (0, 0) if isinstance(padding, str) else padding  # "valid": others are not packed
