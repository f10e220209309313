"""Joining chains of convolutions into one chain, with images in 8 bits between them where possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hf_cpu_accel.ops.chain.steps import (
    ChannelsStep,
    CombineStep,
    ConvolutionStep,
    PoolingStep,
    Step,
)
from hf_cpu_accel.packing.convolution import is_of_tiles, is_of_windows

Steps = list[Step]


def join(chains: Sequence[Sequence[Step]]) -> Steps:
    """Return the steps of all chains as one chain; each chain reads the last image of the chain before.

    A step keeps its range if its image can be in bytes: it is not the last image, and only int8 weights of windows or tiles read
    it.
    """
    joined: Steps = []
    for chain in chains:
        before, steps = len(joined), list(chain)
        for step in steps:
            moved = replace(step, source=step.source + before)
            if isinstance(moved, ConvolutionStep | CombineStep | ChannelsStep) and moved.residual is not None:
                moved = replace(moved, residual=moved.residual + before)
            joined.append(moved)
    in_bytes = can_be_in_bytes(joined, last=False)
    return [
        replace(step, range=None) if isinstance(step, ConvolutionStep) and not can else step
        for step, can in zip(joined, in_bytes, strict=True)
    ]


def can_be_in_bytes(steps: Steps, *, last: bool) -> list[bool]:
    """Return, for the image of each step, whether all steps that read it accept bytes.

    A pooling accepts bytes if its own image may be in bytes.

    Args:
        last: whether the last image may be in bytes.
    """
    can = [True] * len(steps)
    can[-1] = last
    for number in reversed(range(len(steps))):
        step = steps[number]
        multiplies = isinstance(step, ConvolutionStep) and not step.is_grouped
        if not multiplies and not _keeps_bytes(step):
            can[number] = False
        takes = multiplies_bytes(step) if isinstance(step, ConvolutionStep) else can[number]
        read = [] if takes else [step.source]
        if isinstance(step, CombineStep | ChannelsStep) and step.residual is not None:
            read.append(step.residual)
        for image in read:
            if image > 0:
                can[image - 1] = False
    return can


def _keeps_bytes(step: Step) -> bool:
    return isinstance(step, PoolingStep) and step.kind == "max pooling"


def multiplies_bytes(step: ConvolutionStep) -> bool:
    """Return whether the weight of `step` multiplies images, or tiles of images, in bytes."""
    weight = step.weight
    return weight.scale is not None and (is_of_windows(weight.data) or is_of_tiles(weight.data))
