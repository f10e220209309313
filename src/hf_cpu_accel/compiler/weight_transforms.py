"""Tensors that are made from parameters ahead of the calls of a graph: packed weights and joined biases.

A pass asks for one while it rewrites (`Rewriter.derived`) and gets inputs of the graph in return; `bind.py` makes the tensors on
the first call, and again when a parameter has changed. So compiled graphs hold no weights: they are cached, and reused by models
with other weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from threading import RLock
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hf_cpu_accel.ops.values import KeptValues, sampled
from hf_cpu_accel.packing.convolution import pack_conv2d, packed_shapes
from hf_cpu_accel.packing.linear import concat, pack_linear, shapes_of

Shapes = list[tuple[tuple[int, ...], torch.dtype]]


@runtime_checkable
class Recipe(Protocol):
    """How to make tensors from parameters. Hashable: equal recipes for the same parameters are made once."""

    def shapes(self, *sources: Tensor) -> Shapes:
        """Of what `make` gives, from the shapes of the sources."""

    def make(self, *sources: Tensor) -> list[Tensor]: ...


@dataclass(frozen=True)
class PackedLinears:
    """The weights of one linear layer, or of several whose outputs stand side by side, as `packing.pack_linear` gives them: data,
    and scale for integers.

    Attributes:
        dtype: one of `packing.DTYPES`.
        transposed: the sources are [K, N], not [N, K].
    """

    dtype: str
    transposed: bool = False

    def shapes(self, *sources: Tensor) -> Shapes:
        rows, columns = (1, 0) if self.transposed else (0, 1)
        return shapes_of(sum(int(w.shape[rows]) for w in sources), int(sources[0].shape[columns]), self.dtype)

    def make(self, *sources: Tensor) -> list[Tensor]:
        weights = [weight.t() if self.transposed else weight for weight in sources]
        packed = concat([pack_linear(weight, self.dtype) for weight in weights])
        return [packed.data] if packed.scale is None else [packed.data, packed.scale]


@dataclass(frozen=True)
class JoinedBiases:
    """The biases of several linear layers side by side in float32.

    Attributes:
        sizes: of each layer: its features, and whether it has a bias; zeros stand for those that are missing.
    """

    sizes: tuple[tuple[int, bool], ...]

    def shapes(self, *sources: Tensor) -> Shapes:
        return [((sum(features for features, _ in self.sizes),), torch.float32)]

    def make(self, *sources: Tensor) -> list[Tensor]:
        given = iter(sources)
        return [torch.cat([next(given).float() if has else torch.zeros(n) for n, has in self.sizes])]


@dataclass(frozen=True)
class PackedConvolution:
    """The weight of a convolution of images, or of sequences as images of one row, as `packing.convolution.pack_conv2d` gives it.

    Attributes:
        dtype, tiled: see there.
    """

    dtype: str
    tiled: bool

    def shapes(self, *sources: Tensor) -> Shapes:
        return packed_shapes([int(size) for size in sources[0].shape], self.dtype, tiled=self.tiled)

    def make(self, *sources: Tensor) -> list[Tensor]:
        weight = sources[0] if sources[0].dim() == 4 else sources[0].unsqueeze(2)
        packed = pack_conv2d(weight, self.dtype, tiled=self.tiled)
        return [packed.data] if packed.scale is None else [packed.data, packed.scale]


@dataclass(frozen=True)
class Value:
    """What stands for a tensor among the arguments of a step: source `number`, or, counted on from those, what a step made."""

    number: int


@dataclass(frozen=True)
class Computed:
    """What a few ops make of the sources.

    Attributes:
        steps: (name of the op, its arguments, those given by name), in order; the last one makes the result.
        shape, dtype: of the result.
    """

    steps: tuple[tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def shapes(self, *sources: Tensor) -> Shapes:
        return [(self.shape, self.dtype)]

    def make(self, *sources: Tensor) -> list[Tensor]:
        values = list(sources)

        def given(argument: Any) -> Any:
            if isinstance(argument, Value):
                return values[argument.number]
            return [given(part) for part in argument] if isinstance(argument, tuple) else argument

        for name, args, kwargs in self.steps:
            op = attrgetter(name)(torch.ops)
            values.append(op(*map(given, args), **{key: given(value) for key, value in kwargs}))
        return [values[-1].contiguous()]


@dataclass(frozen=True)
class Part:
    """Some of what a recipe makes.

    Attributes:
        places: which of its tensors.
    """

    recipe: Recipe
    places: tuple[int, ...]

    def shapes(self, *sources: Tensor) -> Shapes:
        made = self.recipe.shapes(*sources)
        return [made[place] for place in self.places]

    def make(self, *sources: Tensor) -> list[Tensor]:
        made = self.recipe.make(*sources)
        return [made[place] for place in self.places]


@dataclass(frozen=True)
class Composed:
    """A recipe some of whose sources are made by others; those are forgotten once it is done.

    Attributes:
        inner: for each source of `outer` None, if it is a source of the whole, or what makes it, one tensor, and of how many.
    """

    outer: Recipe
    inner: tuple[tuple[Recipe, int] | None, ...]

    def shapes(self, *sources: Tensor) -> Shapes:
        def shape_of(recipe: Recipe, *of: Tensor) -> Tensor:
            ((shape, dtype),) = recipe.shapes(*of)
            return torch.empty(shape, dtype=dtype, device="meta")

        return self.outer.shapes(*self._sources(sources, shape_of))

    def make(self, *sources: Tensor) -> list[Tensor]:
        return self.outer.make(*self._sources(sources, lambda recipe, *of: recipe.make(*of)[0]))

    def _sources(self, sources: Sequence[Tensor], make: Callable[..., Tensor]) -> Iterator[Tensor]:
        left = iter(sources)
        for made in self.inner:
            yield next(left) if made is None else make(made[0], *islice(left, made[1]))


@dataclass(frozen=True)
class FoldedNorm:
    """Weight and bias of a convolution with the batch norm behind it in them (Ioffe & Szegedy 2015, arXiv:1502.03167). The sources
    are its weight, the norm's mean and variance, and what is given of its bias and the norm's weight and bias.

    Attributes:
        eps: added to the variance.
        given: which of those three there are.
    """

    eps: float
    given: tuple[bool, bool, bool]

    def shapes(self, *sources: Tensor) -> Shapes:
        weight = sources[0]
        shape = tuple(int(size) for size in weight.shape)
        return [(shape, weight.dtype), (shape[:1], weight.dtype)]

    def make(self, *sources: Tensor) -> list[Tensor]:
        weight, mean, variance, *others = (source.float() for source in sources)
        parts = iter(others)
        bias, scale, shift = (next(parts) if given else None for given in self.given)
        factor = torch.rsqrt(variance + self.eps) * (1.0 if scale is None else scale)
        moved = ((0.0 if bias is None else bias) - mean) * factor + (0.0 if shift is None else shift)
        folded = weight * factor.reshape(-1, *[1] * (weight.dim() - 1))
        return [folded.to(sources[0].dtype), moved.to(sources[0].dtype)]


class Fingerprint:
    """Recognizes tensors that were not written to.

    Versions count the writes of torch's ops. Writes through `.data` or numpy have no version, so values are compared, too: all of a
    small tensor, and some of a large one, all over it. So writes to whole tensors are noticed. A write through `.data` to a few
    rows of a large one may not be: comparing all of it would take as long as computing with it.

    The tensors are not stored as they are: only their ids, addresses and views of their memory.
    """

    __slots__ = ("_pointers", "_values", "_versions")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._versions = _versions(tensors)
        self._pointers = list(map(Tensor.data_ptr, tensors))
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(_compared(tensor))
        self._values = [KeptValues(some) for some in by_dtype.values()]

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these tensors have the same memory and values."""
        return (
            self._versions == _versions(tensors)
            and self._pointers == list(map(Tensor.data_ptr, tensors))
            and all(values.are_held() for values in self._values)
        )


class Derived:
    """What a recipe made, and from what.

    Attributes:
        sources: the fingerprint of what it was made from.
        tensors: the result.
    """

    def __init__(self, recipe: Recipe, sources: Sequence[Tensor]) -> None:
        self.sources = Fingerprint(sources)
        with torch.no_grad():
            self.tensors = recipe.make(*(source.detach() for source in sources))


def _compared(tensor: Tensor) -> Tensor:
    if tensor.numel() <= _MOST_COMPARED:
        return tensor.detach()
    return sampled(tensor, tensor.numel() // _SAMPLED)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return list(map(_version, tensors))
    except RuntimeError:  # inference tensors count no versions
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


_version = attrgetter("_version")
# Elements up to which a tensor is compared as a whole, in a microsecond, and how many of a larger one. A sample is a cache miss.
_MOST_COMPARED, _SAMPLED = 1 << 14, 128

_lock = RLock()
# first source -> {(recipe, ids of the other sources): what was made}. Held weakly on both sides: by parameter and by user.
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def derive(recipe: Recipe, sources: Sequence[Tensor]) -> Derived:
    """What `recipe` makes of `sources`, shared by all graphs that use it and made anew if a source has changed."""
    with _lock:
        of_first = _known.setdefault(sources[0], weakref.WeakValueDictionary())
        # The id of a source cannot be another's while what was made from it is in use: its users hold the sources.
        key = (recipe, *(id(source) for source in sources[1:]))
        derived: Derived | None = of_first.get(key)
        if derived is None or not derived.sources.matches(sources):
            derived = of_first[key] = Derived(recipe, sources)
        return derived
