"""Layer fusion for convolution networks: the ops after the depthwise convolution of a ConvNeXt block (Liu et al. 2022,
arXiv:2201.03545) in one op call, residual included.

A block is matched from the modules of a layer, whose linears are packed already, and verified on an image.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hf_cpu_accel.check import compare
from hf_cpu_accel.guard.modules import instance_forward
from hf_cpu_accel.lazy.lazy_tensor import ordinary
from hf_cpu_accel.packing.linear import QUANTIZED
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, Reference, fused_layer
from hf_cpu_accel.plan import PlanItem, Structure
from hf_cpu_accel.providers.route import Route
from hf_cpu_accel.rewrite.core.activations import identify
from hf_cpu_accel.rewrite.core.context import Context, refusal_to_swap
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.fuse_each import fuse_each
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow, shadow_of
from hf_cpu_accel.rewrite.linear.dispatch import FFNWork, Part
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.runtime.tracing import is_tracing
from hf_cpu_accel.tolerance import CONVOLUTION_BLOCK

STRUCTURE = Structure("convolution block", "block")


@dataclass(frozen=True)
class BlockParts:
    """The names of the parts of x + gain * down(activation(up(norm(convolution(x))))), with channels last from the norm on.

    Attributes:
        gain: name of the parameter, or None.
    """

    convolution: str
    norm: str
    up: str
    down: str
    activation: str
    gain: str | None


class FusedConvolutionBlock(FusedModuleMixin):
    """Mixed into the block's own class: [N, C, H, W] -> [N, C, H, W], channels last.

    The children, hooks and attributes are those of the original. Its own forward runs where hooks read the linears, and while a
    graph is traced.
    """

    _block: BlockParts
    _ffn: tuple[Route, Tensor | None] | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        image = args[0] if len(args) == 1 and not kwargs else None
        if image is None or image.dim() != 4 or self.is_watched or is_tracing():
            return self._original_class.forward(self, *args, **kwargs)
        check_inference(self, image)
        image = ordinary(image)
        block = self._block
        convolution, norm = self._modules[block.convolution], self._modules[block.norm]
        assert convolution is not None
        assert norm is not None
        rows = norm(convolution(image).permute(0, 2, 3, 1))
        route, gain = self._ffn or self._bind()
        residual = image.permute(0, 2, 3, 1)
        output = route(rows, residual) if gain is None else torch.addcmul(residual, route(rows), gain)
        return output.permute(0, 3, 1, 2)

    def reference_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reference | None:
        return Reference(args, kwargs)

    def _bind(self) -> tuple[Route, Tensor | None]:
        """Return the route that computes the linears, and the gain if their weights do not include it."""
        block = self._block
        up, down = self.get_submodule(block.up), self.get_submodule(block.down)
        assert isinstance(up, PackedLinear)
        assert isinstance(down, PackedLinear)
        gain = None if block.gain is None else getattr(self, block.gain).detach()
        first, last = (linear.group.part(linear.index, linear.index) for linear in (up, down))
        if gain is not None and last.packed.dtype in QUANTIZED:  # their scale per feature includes it
            last, gain = _multiplied(last, gain.float()), None
        work = FFNWork(first, last, block.activation, residual=gain is None)
        self._ffn = Route(work, measured=up.group.measured), gain
        return self._ffn

    def _apply(self, fn: Any, recurse: bool = True) -> FusedConvolutionBlock:
        super()._apply(fn, recurse)
        self._ffn = None  # holds copies of the biases and the gain
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ffn": None}  # other providers' weights cannot be copied


def fuse_convolution_blocks(context: Context) -> list[PlanItem]:
    """Fuse every block of the model. Call it after linears and convolutions are packed."""
    return fuse_each(context, STRUCTURE, _match_block, lambda fused, _: ("ffn", _down(fused).packed_dtype))


def _down(fused: FusedConvolutionBlock) -> PackedLinear:
    down = fused.get_submodule(fused._block.down)
    assert isinstance(down, PackedLinear)
    return down


def _match_block(layer: nn.Module, path: str, context: Context) -> FusedConvolutionBlock | Refusal | None:
    """Return the block with the fused forward if both agree; None if it holds something else."""
    block = _guess(layer)
    if block is None:
        return None
    reason = refusal_to_swap(layer, path, context)
    if reason is None and any(instance_forward(part) is not None for part in layer.modules()):
        reason = "a module in it has a replaced forward"
    if reason is not None:
        return Refusal(reason)
    fuse: Callable[..., FusedConvolutionBlock] = partial(
        fused_layer, FusedConvolutionBlock, _block=block, _ffn=None
    )
    # Both get other gains during the comparison, which callers of the model must not see.
    return _disagreement(fuse(shadow_of(layer)), Shadow(layer), block) or fuse(layer)


def _guess(layer: nn.Module) -> BlockParts | None:
    """Return the parts of a layer by its modules; other parts have no effect."""
    linears, others, activations = [], [], []
    convolution = None
    for name, child in layer.named_children():
        if isinstance(child, PackedLinear) and not hasattr(child, "kernel_size"):
            linears.append((name, child))
        elif getattr(child, "groups", 1) == getattr(child, "in_channels", 0) > 1 and convolution is None:
            convolution = name
        elif (activation := identify(child)) is not None:
            activations.append(activation)
        else:
            others.append(name)
    activations = [name for name in activations if name != "none"]
    parameters = list(layer._parameters)
    if (
        convolution is None
        or [len(linears), len(others)] != [2, 1]
        or max(len(activations), len(parameters)) > 1
    ):
        return None
    (up_name, up), (down_name, down) = linears
    if up.in_features > down.in_features:
        (up_name, up), (down_name, down) = (down_name, down), (up_name, up)
    gain = parameters[0] if parameters and layer._parameters[parameters[0]] is not None else None
    if up.out_features != down.in_features or up.in_features != down.out_features:
        return None
    if gain is not None and layer.get_parameter(gain).shape != (down.out_features,):
        return None
    return BlockParts(
        convolution, others[0], up_name, down_name, activations[0] if activations else "none", gain
    )


def _disagreement(fused: nn.Module, shadow: Shadow, block: BlockParts) -> Refusal | None:
    """Return None if the fused block agrees with the layer, also with another gain: the real one may be too small to matter."""
    layer = shadow.module
    down = layer.get_submodule(block.down)
    assert isinstance(down, PackedLinear)
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(2, down.out_features, 9, 11, generator=generator).to(down.weight_dtype)
    gain = torch.rand(down.out_features, generator=generator).add(0.5).to(down.weight_dtype)
    values = {} if block.gain is None else {block.gain: gain}
    with torch.no_grad(), shadow.running():
        theirs = call_foreign(functional_call, layer, values, (image,))
        if isinstance(theirs, Refusal):
            return theirs
        ours = functional_call(fused, values, (image,))
    agrees = compare(_added(ours, image), _added(theirs, image), dim=1).within(
        CONVOLUTION_BLOCK.of(down.weight_dtype)
    )
    return None if agrees else Refusal("the fused block computes a different result")


def _added(output: Any, image: Tensor) -> Tensor | None:
    """Return the difference of a block's output from its input, [N, C, H, W]."""
    fits = isinstance(output, Tensor) and output.shape == image.shape
    return output.float() - image.float() if fits else None


def _multiplied(part: Part, gain: Tensor) -> Part:
    """Return a part whose outputs are `gain` times those of `part`."""
    assert part.packed.scale is not None
    scale, sums = part.packed.scale
    packed = dataclasses.replace(part.packed, scale=torch.stack((scale * gain, sums)))
    return Part(packed, None if part.bias is None else part.bias.detach().float() * gain)
