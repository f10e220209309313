"""The kernel of a transposed convolution as windows over its input.

A value of the input adds to a kernel of values of the output, `stride` apart from one to the next. So a cell of stride values on
each side is computed from as many values of the input as a kernel has cells: its window.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d


def margins_of(module: Transposed) -> tuple[int, ...]:
    """Return how much shorter the output is on either side, for each dimension."""
    assert not isinstance(module.padding, str)  # torch rejects strings for transposed ones
    return tuple(module.padding)


def windows_of(sizes: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return how many values of the input a cell of the output is computed from, for each dimension of a kernel of `sizes`."""
    return tuple(-(-size // step) for size, step in zip(sizes, stride, strict=True))


def as_windows(kernel: Tensor, stride: Sequence[int]) -> Tensor:
    """Return a kernel [C, out_channels, *sizes] as [product of stride * out_channels, C, *windows], the first value of the input
    first."""
    sizes = kernel.shape[2:]
    windows = windows_of(sizes, stride)
    missing = [count * step - size for count, step, size in zip(windows, stride, sizes, strict=True)]
    whole = functional.pad(kernel, [pad for end in reversed(missing) for pad in (0, end)])
    cells = whole.view(*kernel.shape[:2], *(n for pair in zip(windows, stride, strict=True) for n in pair))
    taps, steps = range(2, cells.dim(), 2), range(3, cells.dim(), 2)
    made = cells.flip(tuple(taps)).permute(*steps, 1, 0, *taps)
    return made.flatten(0, len(stride))


def as_kernel(made: Tensor, sizes: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Invert `as_windows`; the result is contiguous."""
    count = len(stride)
    cells = made.unflatten(0, (*stride, -1))  # *stride, out_channels, C, *windows
    taps = range(count + 2, 2 * count + 2)
    pairs = [dim for pair in zip(taps, range(count), strict=True) for dim in pair]
    whole = cells.flip(tuple(taps)).permute(count + 1, count, *pairs)
    for dim in range(2, 2 + count):
        whole = whole.flatten(dim, dim + 1)
    for dim, size in enumerate(sizes, start=2):
        whole = whole.narrow(dim, 0, size)
    return whole.contiguous()
