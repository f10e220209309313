"""Layer fusion for convolution networks: a residual block (He et al. 2015, arXiv:1512.03385), or a whole stage, in one call.

The links are not guessed from classes or names: a module runs on a small image, and the calls of its convolutions and poolings
are all that it does if its output is the last of theirs (trace.py). The chain is then verified on other images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.guard.modules import instance_forward
from hf_cpu_accel.lazy.lazy_tensor import ordinary
from hf_cpu_accel.ops.chain.joined import Steps
from hf_cpu_accel.ops.chain.reference import output_shape
from hf_cpu_accel.ops.chain.steps import ConvolutionStep
from hf_cpu_accel.ops.convolution_chain import BoundConvolutions, bind, convolutions
from hf_cpu_accel.ops.derivatives import refuse_transforms
from hf_cpu_accel.packing.activation_range import Range
from hf_cpu_accel.patching.accelerated_module import CopiedParameter
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, Reference, fused_layer
from hf_cpu_accel.plan import PlanItem, Structure
from hf_cpu_accel.rewrite.convolution.chain_parts import is_norm, is_of_images, parts_of
from hf_cpu_accel.rewrite.convolution.deferred import DeferringConvolution
from hf_cpu_accel.rewrite.convolution.deferred_images import Block, DeferredImages, bind_joined
from hf_cpu_accel.rewrite.convolution.folded_norm import FoldedNorm
from hf_cpu_accel.rewrite.convolution.links import AffineLink, Chain, Link
from hf_cpu_accel.rewrite.convolution.trace import DTYPES, read
from hf_cpu_accel.rewrite.core.context import WEIGHT_DTYPES, Context, refusal_to_swap
from hf_cpu_accel.rewrite.core.fuse_each import fuse_each
from hf_cpu_accel.rewrite.core.packed_module import PackedModule, check_inference
from hf_cpu_accel.rewrite.core.refusal import Refusal, is_listed
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow, shadow_of
from hf_cpu_accel.rewrite.core.verify import run_alone
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.runtime.tracing import is_tracing
from hf_cpu_accel.tolerance import RESIDUAL_BLOCKS

STRUCTURE = Structure("residual blocks", "block")
# [batch, height, width]: for matching, and for verification.
_IMAGE = (1, 9, 9)
_OTHERS = ((2, 13, 10), (1, 32, 33))
# Factor for networks that reject small images: poolings without padding halve an image to nothing.
_LARGER = 7
_PIXELS = (3, 1, 1)  # layers that halve an image keep its shape; not all layers accept it


class FusedResidualBlock(FusedModuleMixin):
    """Mixed into the module's own class: [N, C, H, W] -> [N, C', H', W'], channels last.

    The children, hooks and attributes are those of the original. Its own forward runs where hooks read values inside, for other
    arguments, and while a graph is traced.

    Attributes:
        _bf16_intermediates: images between its convolutions are bfloat16, unless all weights are float32.
        _defers: its output is computed together with that of neighboring blocks, when it is read (neighbors.py).
        _ranges: static ranges of the outputs of the links, where these may be int8; None without any (static_images.py).
        _observer: called with the number of each link and its output, during calibration.
    """

    copies_parameters = True
    _chain: Chain
    _channels: int
    _bf16_intermediates: bool
    _defers: bool = False
    _narrow: tuple[bool | None] | None = None
    _bound: BoundConvolutions | None
    _ranges: tuple[Range | None, ...] | None = None
    _observer: Callable[[int, Tensor], None] | None = None
    _joined: tuple[tuple[Steps, ...], BoundConvolutions] | None = None
    _steps: Steps | None = None
    _shape: tuple[torch.Size, tuple[int, ...]] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        image = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(image, Tensor) or not self._takes(image) or self.is_watched:
            return self._original_class.forward(self, *args, **kwargs)
        check_inference(self, image)
        refuse_transforms("an accelerated residual block", image)
        defers = (self._defers or self.has_ranges) and self._observer is None
        if defers and (shape := self._output_shape(image)) is not None:
            return DeferredImages.after(image, self, shape)
        image = ordinary(image)
        if self._observer is not None:
            return self._observed(image, self._observer)
        return convolutions(image, self._bound or self._bind())

    def reference_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reference | None:
        # Reading an image between two blocks in more than 8 bits would change the output of the call.
        return None if self.has_ranges else Reference(args, kwargs)

    def copied_parameters(self) -> Iterator[CopiedParameter]:
        """Yield all parameters, and the buffers of norms that are links of the chain."""
        yield from super().copied_parameters()
        for norm in filter(is_norm, self.modules()):
            yield from (CopiedParameter(norm._buffers, name) for name in norm._buffers)

    def _takes(self, image: Tensor) -> bool:
        fits = image.dim() == 4 and image.shape[1] == self._channels and image.dtype in WEIGHT_DTYPES
        return fits and not is_tracing()

    def _bind(self) -> BoundConvolutions:
        self._bound = bind([link.step(self) for link in self._chain], narrow=self.is_narrow)
        return self._bound

    @property
    def is_narrow(self) -> bool:
        """Return whether images between its convolutions may be narrower than float32."""
        return self._bf16_intermediates and _coarsest(self, self._chain) != "float32"

    @property
    def narrow(self) -> bool | None:
        """See `deferred_images.Block`."""
        if self._narrow is None:
            self._narrow = (self.is_narrow if len(self._chain) > 1 else None,)
        return self._narrow[0]

    @property
    def has_ranges(self) -> bool:
        """See `deferred_images.Block`."""
        return self._ranges is not None

    def steps(self) -> Steps:
        """See `deferred_images.Block`."""
        if self._steps is None:
            ranges = self._ranges or (None,) * len(self._chain)
            steps = zip((link.step(self) for link in self._chain), ranges, strict=True)
            self._steps = [
                replace(step, range=range) if isinstance(step, ConvolutionStep) else step
                for step, range in steps
            ]
        return self._steps

    def joined(self, blocks: Sequence[Block]) -> BoundConvolutions:
        """See `deferred_images.Block`."""
        parts, known = tuple(block.steps() for block in blocks), self._joined
        if known is None or len(known[0]) != len(parts) or any(map(is_not, known[0], parts)):
            known = self._joined = parts, bind_joined(blocks)
        return known[1]

    def _output_shape(self, image: Tensor) -> tuple[int, ...] | None:
        """Return the shape of the output, or None if it would be empty."""
        known = self._shape
        if known is None or known[0] != image.shape:
            rows = tuple(image.shape[number] for number in (0, 2, 3, 1))
            batch, *sides, channels = output_shape(rows, (self._bound or self._bind()).layout)
            known = self._shape = image.shape, (batch, channels, *sides)
        return known[1] if min(known[1]) > 0 else None

    def _observed(self, image: Tensor, observer: Callable[[int, Tensor], None]) -> Tensor:
        """Run link by link, in the dtype of the image."""
        images = [image]
        for number, link in enumerate(self._chain):
            images.append(link.compute(self, images))
            observer(number, images[-1])
        return images[-1]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedResidualBlock:
        super()._apply(fn, recurse)
        self._bound = self._steps = self._joined = self._narrow = None  # these hold biases
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bound": None, "_steps": None, "_joined": None}


def fuse_residual_blocks(context: Context) -> list[PlanItem]:
    """Fuse the largest modules of the model that are chains of convolutions. Call it after convolutions are packed."""
    return fuse_each(context, STRUCTURE, chain_of, op_and_dtype, skip_children=True, expected=is_listed)


def op_and_dtype(fused: FusedResidualBlock, path: str) -> tuple[str, str]:
    """Return the op and dtype for the plan."""
    return "convolutions", _coarsest(fused, fused._chain)


def chain_of(
    layer: nn.Module, path: str, context: Context, *, fewest: int = 2
) -> FusedResidualBlock | Refusal | None:
    """Return the layer with the fused forward if both agree; None if it holds something else.

    Args:
        fewest: minimum number of convolutions and poolings.
    """
    if not may_be_chain(layer, fewest):
        return None
    reason = refusal_to_swap(layer, path, context)
    if reason is None and any(context.skipped(f"{path}.{part}") for part in parts_of(layer)):
        reason = "skip_modules"
    if reason is None and any(instance_forward(part) is not None for part in layer.modules()):
        reason = "a module in it has a replaced forward"
    if reason is not None:
        return Refusal(reason)
    # Any convolution of the layer; the chain shows the one that reads the layer's input.
    candidate = next(part for part in layer.modules() if _reads_images(part))
    shadow, times = Shadow(layer), 1
    chain = read(layer, lambda side: _image(candidate, 1, side, side), fewest=fewest)
    if isinstance(chain, Refusal) and not _takes_image(shadow, _image(candidate, *_IMAGE)):
        times = _LARGER
        chain = read(layer, lambda side: _image(candidate, 1, side, side, times), fewest=fewest)
    if isinstance(chain, Refusal):
        return chain
    first = _first(layer, chain)
    if first is None:
        return Refusal("none of its convolutions or norms reads its input")
    fuse: Callable[..., FusedResidualBlock] = partial(
        fused_layer, FusedResidualBlock, _chain=chain, _channels=_channels_of(first), _bound=None
    )
    fused = fuse(shadow_of(layer), _bf16_intermediates=False)
    if not _agree(fused, shadow, partial(_image, first, times=times), _coarsest(layer, chain)):
        return Refusal("the fused block differs from it on other images than the traced one")
    return fuse(layer, _bf16_intermediates=True)


def may_be_chain(layer: nn.Module, fewest: int = 2) -> bool:
    """Return whether the layer has a convolution, at least `fewest` convolutions and poolings, and otherwise only modules
    without state.

    One of several convolutions must not be a linear: those may be faster by another provider, which runs each alone.
    """
    if isinstance(layer, PackedModule | FoldedNorm | FusedResidualBlock):
        return False
    for module in layer.modules():
        has_state = module._parameters or module._buffers
        if has_state and not (isinstance(module, FoldedNorm) or is_of_images(module) or is_norm(module)):
            return False
    parts = [part for part in parts_of(layer).values() if not is_norm(part)]
    convolutions = [part for part in parts if isinstance(part, DeferringConvolution)]
    if len(parts) == 1:
        return len(convolutions) == fewest
    return len(parts) >= fewest and any(not isinstance(module, PackedLinear) for module in convolutions)


def _takes_image(shadow: Shadow, image: Tensor) -> bool:
    with shadow.running():
        return run_alone(shadow.module, image) is not None


def _agree(fused: nn.Module, shadow: Shadow, image_of: Callable[..., Tensor], dtype: str) -> bool:
    """Return whether the chain agrees with the layer for other images, also in batches and in both dtypes."""
    layer = shadow.module
    with shadow.running():
        for sizes in (*_OTHERS, _PIXELS):
            ours, theirs = (run_alone(module, image_of(*sizes)) for module in (fused, layer))
            if sizes is _PIXELS and theirs is None:
                continue
            if not compare(ours, theirs, dim=1).within(RESIDUAL_BLOCKS.of(dtype)):
                return False
        for other in WEIGHT_DTYPES:  # a cast inside shows only with another dtype
            ours, theirs = (run_alone(module, image_of(*_IMAGE).to(other)) for module in (fused, layer))
            if theirs is not None and (ours is None or ours.dtype is not theirs.dtype):
                return False
    return True


def _first(layer: nn.Module, chain: Chain) -> Any:
    """Return the first convolution or norm that reads the layer's input, or None."""
    readers = (link for link in chain if link.source == 0 and isinstance(link, Link | AffineLink))
    link = next(readers, None)
    return None if link is None else layer.get_submodule(link.path)


def _coarsest(layer: nn.Module, chain: Chain) -> str:
    """Return the dtype of the weights, the coarsest if they differ."""
    dtypes = {layer.get_submodule(link.path).packed_dtype for link in chain if isinstance(link, Link)}
    return next(dtype for dtype in reversed(DTYPES) if dtype in dtypes)


def _reads_images(part: nn.Module) -> bool:
    return isinstance(part, DeferringConvolution) or is_norm(part)


def _channels_of(reader: Any) -> int:
    channels: int = reader.num_features if is_norm(reader) else reader.in_channels
    return channels


def _image(reader: Any, batch: int, height: int, width: int, times: int = 1) -> Tensor:
    """Return a random image for a convolution or norm, `times` as large."""
    generator = torch.Generator().manual_seed(0)
    sides = (times * height + times // 2, times * width + times // 2)
    image = torch.randn(batch, _channels_of(reader), *sides, generator=generator)
    return image.to(reader.running_mean.dtype if is_norm(reader) else reader.weight_dtype)
