"""Moves of image channels: concatenation (Huang et al. 2016, arXiv:1608.06993), splits and shuffles (Ma et al. 2018,
arXiv:1807.11164)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_cpu_accel.rewrite.convolution.links import AnyLink, ChannelsLink

_ATEN = torch.ops.aten
_SPLITS = (_ATEN.split.Tensor, _ATEN.split_with_sizes.default)
_VIEWS = (_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN._reshape_alias.default)


class Images(Protocol):
    """The images of a trace, and the links between them."""

    links: list[AnyLink]

    def number(self, image: Tensor) -> int | None:
        """Return the number of the image, or None."""

    def add_copy(self, image: Tensor, source: int) -> None:
        """Record that `image` is image `source` again."""

    def add_link(self, output: Tensor | None, link: AnyLink) -> Any:
        """Record the image that a link creates."""


@dataclass
class ChannelMoves:
    """Record channel moves as links of a trace.

    Attributes:
        views: images whose channels have several dimensions, each with its version, the number of its image and the order of
            its channels.
    """

    views: list[tuple[Tensor, int, int, Tensor]] = field(default_factory=list)

    def done(
        self, images: Images, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> bool:
        """Return whether `func` moves channels, and record the move unless it moves something else, too."""
        if func is _ATEN.cat.default:
            self._put_together(images, args[0], _dimension(args, kwargs, 0), output)
        elif func in _SPLITS:
            self._split(images, args[0], _dimension((None, *args[2:]), kwargs, 0), output)
        elif func is _ATEN.slice.Tensor:
            self._sliced(images, args, output)
        elif func in _VIEWS or func in (_ATEN.transpose.int, _ATEN.permute.default, _ATEN.clone.default):
            return self._viewed(images, func, args, output)
        else:
            return False
        return True

    def _put_together(self, images: Images, parts: Sequence[Tensor], dimension: int, output: Tensor) -> None:
        numbers = [images.number(part) if part.dim() == 4 else None for part in parts]
        if dimension % 4 != 1 or None in numbers:
            return
        first, channels = numbers[0], parts[0].shape[1]
        assert first is not None
        if len(parts) == 1:  # the start of a growing list
            images.add_copy(output, first)
        for part, number in zip(parts[1:], numbers[1:], strict=True):
            channels += part.shape[1]
            link = ChannelsLink(first, number, tuple(range(channels)))
            is_whole = part is parts[-1] and channels == output.shape[1]
            # A growing list of images (Huang et al. 2016) is concatenated again for each reader.
            if link in images.links and not is_whole:
                first = images.links.index(link) + 1
                continue
            images.add_link(output if is_whole else None, link)
            first = len(images.links)

    def _split(self, images: Images, image: Tensor, dimension: int, parts: Sequence[Tensor]) -> None:
        source = images.number(image)
        if source is None or image.dim() != 4 or dimension % 4 != 1:
            return
        start = 0
        for part in parts:
            _move(images, source, range(start, start + part.shape[1]), part)
            start += part.shape[1]

    def _sliced(self, images: Images, args: tuple[Any, ...], output: Tensor) -> None:
        given, usual = list(args), [None, 0, None, None, 1]
        image, dimension, start, end, step = given + usual[len(given) :]
        source = images.number(image)
        if source is not None and image.dim() == 4 and dimension % 4 == 1:
            _move(images, source, range(*slice(start, end, step).indices(image.shape[1])), output)

    def _viewed(self, images: Images, func: Any, args: tuple[Any, ...], output: Tensor) -> bool:
        image = args[0]
        found = next(self._arrangements(images, image), None)
        if found is None:
            return False
        source, numbers = found
        last = image.dim() - 2
        if func is _ATEN.permute.default:
            order = [dimension % image.dim() for dimension in args[1]]
            if order[0] != 0 or order[-2:] != [last, last + 1]:
                return False
            numbers = numbers.permute([dimension - 1 for dimension in order[1:-2]])
        elif func is _ATEN.transpose.int:
            one, other = (dimension % image.dim() for dimension in args[1:])
            if min(one, other) < 1 or max(one, other) >= last:
                return False
            numbers = numbers.transpose(one - 1, other - 1)
        elif output.shape[:1] != image.shape[:1] or output.shape[-2:] != image.shape[-2:] or output.dim() < 4:
            return False
        else:
            numbers = numbers.reshape(output.shape[1:-2])
        if output.dim() > 4:
            self.views.append((output, output._version, source, numbers))
        elif image.dim() > 4:
            _move(images, source, numbers.tolist(), output)
        return True

    def _arrangements(self, images: Images, image: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of an image, or of the image of a view, with the order of its channels."""
        number = images.number(image) if image.dim() == 4 else None
        if number is not None:
            yield number, torch.arange(image.shape[1])
        for view, version, source, numbers in self.views:
            if view is image and image._version == version:
                yield source, numbers


def _move(images: Images, source: int, numbers: Sequence[int], output: Tensor) -> None:
    """Record that `output` has these channels of an image; two successive moves become one."""
    before, residual = images.links[source - 1] if source > 0 else None, None
    if isinstance(before, ChannelsLink):
        source, residual = before.source, before.residual
        numbers = [before.numbers[number] for number in numbers]
    images.add_link(output, ChannelsLink(source, residual, tuple(numbers)))


def _dimension(args: tuple[Any, ...], kwargs: dict[str, Any], default: int) -> int:
    dimension: int = args[1] if len(args) > 1 else kwargs.get("dim", default)
    return dimension
