"""Images between fused blocks of convolutions that are computed when they are read, by all waiting blocks in one call. That is
faster than one call each, and images between two blocks may be int8, too."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from hf_cpu_accel.lazy.lazy_tensor import LazyTensor, ordinary
from hf_cpu_accel.ops.chain.joined import Steps, join
from hf_cpu_accel.ops.convolution_chain import BoundConvolutions, bind, convolutions


class Block(Protocol):
    """A fused block of convolutions.

    Attributes:
        narrow: whether images between its convolutions may be narrower than float32; None if there are no such images.
        has_ranges: whether its images have static ranges.
    """

    @property
    def narrow(self) -> bool | None: ...

    @property
    def has_ranges(self) -> bool: ...

    def steps(self) -> Steps:
        """Return the steps of the block; the same list until its weights change."""

    def joined(self, blocks: Sequence[Block]) -> BoundConvolutions:
        """Return `blocks`, whose last is this one, as one call."""


class DeferredImages(LazyTensor):
    """[N, C, H, W], channels last, after some blocks that have not run yet.

    A reader of a block's output has it computed from the input, or from values that were read before. The next block then
    continues from these values instead of their int8 form. If nothing is int8, outputs that are still referenced are computed on
    the way, so that no block runs twice.
    """

    _input: Tensor
    _blocks: tuple[Block, ...]
    _narrow: bool | None  # `narrow` of the blocks
    _before: tuple[weakref.ref[DeferredImages], ...]  # after each of the blocks but the last
    _next: weakref.ref[DeferredImages] | None

    @classmethod
    def after(cls, image: Tensor, block: Block, shape: Sequence[int]) -> DeferredImages:
        """Return the output of `block` for `image`, of that shape."""
        if not isinstance(image, DeferredImages):
            image = ordinary(image)
            # A copy: it may be a buffer that its owner overwrites before the result is read.
            return cls._of(image.clone(), (block,), (), shape)
        with image._lock:
            narrow, before = block.narrow, image._narrow
            if image._tensor is None and None not in (narrow, before) and narrow is not before:
                image.tensor  # noqa: B018 (float32 stays what it is beside weights of fewer bits)
            if image._tensor is not None:
                made = cls._of(image._tensor, (block,), (), shape)
            else:
                made = cls._of(
                    image._input, (*image._blocks, block), (*image._before, weakref.ref(image)), shape
                )
                made._narrow = before if narrow is None else narrow
            made._lock = image._lock  # one lock for all images of a chain
            image._next = weakref.ref(made)
            return made

    @classmethod
    def _of(
        cls,
        input: Tensor,
        blocks: tuple[Block, ...],
        before: tuple[weakref.ref[DeferredImages], ...],
        shape: Sequence[int],
    ) -> DeferredImages:
        _, channels, height, width = shape
        strides = (channels * height * width, 1, width * channels, channels)
        deferred: DeferredImages = cls.like(shape, input.dtype, strides)
        deferred._input, deferred._blocks, deferred._before, deferred._next = input, blocks, before, None
        deferred._narrow = blocks[-1].narrow
        return deferred

    def _make(self) -> Tensor:
        image, done = self._input, 0
        makes = not any(block.has_ranges for block in self._blocks)
        for number, reference in enumerate(self._before, start=1):
            held = reference()
            if held is None:
                continue
            if held._tensor is None and makes:
                held._tensor = _run(image, self._blocks[done:number])
            if held._tensor is not None:
                image, done = held._tensor, number
        return _run(image, self._blocks[done:])

    def _forget(self) -> None:
        del self._input, self._blocks, self._before

    def _exposed(self) -> Tensor:
        """Return the values for writing, after the next block has read them."""
        values = super()._exposed()
        following = None if self._next is None else self._next()
        if following is not None:
            following.tensor  # noqa: B018
        return values


def _run(image: Tensor, blocks: Sequence[Any]) -> Tensor:
    return convolutions(image, blocks[-1].joined(blocks))


def bind_joined(blocks: Sequence[Block]) -> BoundConvolutions:
    narrow = any(block.narrow for block in blocks)
    return bind(join([block.steps() for block in blocks]), narrow=narrow)
