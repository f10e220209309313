"""Level two for networks of convolutions: a residual block (He et al. 2015, arXiv:1512.03385), or a whole stage, in one call.

Which convolution reads what, and what joins it, is not guessed from classes or names: a module is run on a small image, and what
its convolutions were asked to compute is all that it does if its output is the last of theirs. The chain is then proved on others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
from hf_cpu_accel.rewrite.packed_linear import PackedLinear
from hf_cpu_accel.rewrite.packed_module import PackedModule, check_inference
from hf_cpu_accel.rewrite.pending_convolution import WaitingConvolution
from hf_cpu_accel.rewrite.projection_group import members_apart
from hf_cpu_accel.rewrite.verify import row_error, run_alone

STRUCTURE = "residual blocks"
# Worst pixel of an image, after up to twenty convolutions with the same packed weights, by the coarsest of these. Nothing is
# narrowed for the proof; but one step of a quantised input beside another changes what comes after.
_TOLERANCES = {"float32": 1e-3, "bfloat16": 2e-2, "int8": 3e-2}
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
    _channels: int
    _narrow: bool
    _bound: BoundConvolutions | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        image = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(image, Tensor) or not self._takes(image) or self.is_watched:
            return self._original_class.forward(self, *args, **kwargs)
        check_inference(self, image)
        image = image.tensor if isinstance(image, LazyTensor) else image
        return convolutions(image, self._bound or self._bind())

    def _takes(self, image: Tensor) -> bool:
        fits = image.dim() == 4 and image.shape[1] == self._channels and image.dtype in WEIGHT_DTYPES
        return fits and not (torch.compiler.is_compiling() or torch.jit.is_tracing())

    def _bind(self) -> BoundConvolutions:
        steps, dtypes = [], set()
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
            dtypes.add(weight.dtype)
        self._bound = bind(steps, narrow=self._narrow and dtypes != {"float32"})
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
        fused: FusedResidualBlock = fused_layer(
            FusedResidualBlock,
            layer,
            _chain=chain,
            _channels=_channels(layer, chain),
            _narrow=False,
            _bound=None,
        )
        dtype = _weights(layer, chain)
        if _agree(fused, layer, dtype):
            fused._narrow, fused._bound = True, None
            inside.update(id(module) for module in layer.modules())
            swap_module(context.journal, context.slots[id(layer)], fused)
            items.append(PlanItem(path, STRUCTURE, "convolutions", dtype, packed_bytes=0, reason=None))
    return items


def _may_be_chain(layer: nn.Module) -> bool:
    """Two convolutions at least, and else only what has no state of its own.

    One of them is no linear: those may be faster by another provider, which is asked for each alone.
    """
    if isinstance(layer, PackedModule | FoldedNorm | FusedResidualBlock):
        return False
    convolutions = [module for module in layer.modules() if isinstance(module, WaitingConvolution)]
    for module in layer.modules():
        has_state = module._parameters or module._buffers
        if has_state and not isinstance(module, WaitingConvolution | FoldedNorm):
            return False
    return len(convolutions) > 1 and any(not isinstance(module, PackedLinear) for module in convolutions)


@dataclass
class _Trace:
    """What the convolutions in a module are asked for while it is given an image.

    Attributes:
        images: the input, and then what each of them made, and how often each had been written to by then.
        foreign: whether one of them read something else.
    """

    images: list[tuple[Tensor, int]]
    links: list[Link] = field(default_factory=list)
    foreign: bool = False

    def computed(self, path: str, convolution: Any, input: Tensor, epilogue: Epilogue) -> Tensor:
        source, residual = self._number(input), None
        if epilogue.residual is not None:
            residual = self._number(epilogue.residual)
            self.foreign |= residual is None
        own = convolution.own_weight(normalised=epilogue.normalised)
        if source is None or own is None or own[0].dtype not in _TOLERANCES:
            self.foreign = True
        else:
            self.links.append(Link(path, source, residual, epilogue.normalised, epilogue.activation))
        output: Tensor = type(convolution).compute(convolution, input, epilogue)
        self.images.append((output, output._version))
        return output

    def is_last(self, output: Tensor) -> bool:
        """Whether that is what the last of them made, and nobody has written to it or to the input."""
        return self._number(output) == len(self.images) - 1 and self._number(self.images[0][0]) == 0

    def _number(self, image: Tensor) -> int | None:
        """Which image that is, as it was made."""
        known = (number for number, (tensor, _) in enumerate(self.images) if tensor is image)
        number = next(known, None)
        return None if number is None or image._version != self.images[number][1] else number


def _read(layer: nn.Module) -> tuple[Link, ...] | None:
    """The chain that `layer` is, as far as one image shows."""
    with (
        torch.inference_mode(False),
        ExitStack() as wrapped,
    ):  # writes to the tensors of inference mode are not counted
        wrapped.enter_context(members_apart())
        wrapped.enter_context(_as_they_were(layer))
        image = _image(layer, *_IMAGE)
        trace = _Trace([(image, image._version)])
        for path, module in layer.named_modules():
            if isinstance(module, WaitingConvolution):
                _listen(trace, path, module, wrapped)
        output = run_alone(layer, image)
        if output is None or trace.foreign or len(trace.links) < 2 or not trace.is_last(output):
            return None
    return tuple(trace.links)


@contextmanager
def _as_they_were(layer: nn.Module) -> Iterator[None]:
    """What the convolutions learn from being run alone, without what follows the layer, is forgotten."""
    modules = [module for module in layer.modules() if isinstance(module, WaitingConvolution)]
    before = [(module.waits, module.adds, module.activates) for module in modules]
    try:
        yield
    finally:
        for module, flags in zip(modules, before, strict=True):
            module.waits, module.adds, module.activates = flags


def _listen(trace: _Trace, path: str, module: nn.Module, wrapped: ExitStack) -> None:
    def compute(input: Tensor, epilogue: Epilogue) -> Tensor:
        return trace.computed(path, module, input, epilogue)

    vars(module)["compute"] = compute
    wrapped.callback(vars(module).pop, "compute")


def _agree(fused: nn.Module, layer: nn.Module, dtype: str) -> bool:
    """Whether the chain gives what the layer gives for other images, in batches and in both dtypes, too."""
    with members_apart(), _as_they_were(layer):
        for sizes in _OTHERS:
            ours, theirs = (run_alone(module, _image(layer, *sizes)) for module in (fused, layer))
            if ours is None or theirs is None:
                return False
            if row_error(ours.movedim(1, -1), theirs.movedim(1, -1)) > _TOLERANCES[dtype]:
                return False
        for other in WEIGHT_DTYPES:  # a cast inside shows only where there is something to cast
            ours, theirs = (run_alone(module, _image(layer, *_IMAGE).to(other)) for module in (fused, layer))
            if theirs is not None and (ours is None or ours.dtype is not theirs.dtype):
                return False
    return True


def _channels(layer: nn.Module, chain: tuple[Link, ...]) -> int:
    """Of the layer's input."""
    first: Any = layer.get_submodule(next(link.path for link in chain if link.source == 0))
    channels: int = first.in_channels
    return channels


def _weights(layer: nn.Module, chain: tuple[Link, ...]) -> str:
    """The dtype of the weights, the coarsest where they differ."""
    dtypes = {layer.get_submodule(link.path).packed_dtype for link in chain}
    return next(dtype for dtype in reversed(_TOLERANCES) if dtype in dtypes)


def _image(layer: nn.Module, batch: int, height: int, width: int) -> Tensor:
    first = _first(layer)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, first.in_channels, height, width, generator=generator).to(first.weight_dtype)


def _first(layer: nn.Module) -> Any:
    """Of its convolutions. That it reads the layer's input is seen in the trace."""
    return next(module for module in layer.modules() if isinstance(module, WaitingConvolution))


def _pair_of_numbers(padding: Any) -> tuple[int, int]:
    return (0, 0) if isinstance(padding, str) else padding  # "valid": others are not packed
