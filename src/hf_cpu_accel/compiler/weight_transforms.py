"""Tensors that are computed from parameters before the calls of a graph: packed weights, joined biases and folded constants.

A pass requests them (`Rewriter.derived`) and gets inputs of the graph. `bind.py` computes the tensors at the first call, and again
when a parameter has changed. So compiled graphs contain no weights, and caches of them work for models with other weights.
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

from hf_cpu_accel.guard.values import Fingerprint
from hf_cpu_accel.packing.convolution import pack_conv2d, packed_shapes
from hf_cpu_accel.packing.linear import concat, pack_linear, shapes_of

Shapes = list[tuple[tuple[int, ...], torch.dtype]]


@runtime_checkable
class Recipe(Protocol):
    """A function from parameters to tensors. Hashable: equal recipes of the same parameters are computed once."""

    def shapes(self, *sources: Tensor) -> Shapes:
        """Return the shapes and dtypes of the results of `make`, from the shapes of the sources."""

    def make(self, *sources: Tensor) -> list[Tensor]:
        """Compute the tensors."""


@dataclass(frozen=True)
class PackedLinears:
    """The packed weights of one linear layer, or of several with concatenated outputs (`packing.pack_linear`): data, and scale for
    integers.

    Attributes:
        dtype: one of `packing.DTYPES`.
        transposed: whether the sources are [K, N] instead of [N, K].
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
    """The concatenated biases of several linear layers in float32.

    Attributes:
        sizes: (features, whether it has a bias) of each layer; missing biases are zeros.
    """

    sizes: tuple[tuple[int, bool], ...]

    def shapes(self, *sources: Tensor) -> Shapes:
        return [((sum(features for features, _ in self.sizes),), torch.float32)]

    def make(self, *sources: Tensor) -> list[Tensor]:
        biases = iter(sources)
        return [torch.cat([next(biases).float() if has else torch.zeros(n) for n, has in self.sizes])]


@dataclass(frozen=True)
class PackedConvolution:
    """The packed weight of a convolution (`packing.convolution.pack_conv2d`) of images, or of sequences as images of one row.

    Attributes:
        dtype, tiled: arguments of `pack_conv2d`.
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
    """A reference to a tensor in the arguments of a step: a source, or (counting on from the sources) the result of a step."""

    number: int


@dataclass(frozen=True)
class Computed:
    """The result of a few ops on the sources.

    Attributes:
        steps: (name of the op, its arguments, its keyword arguments), in order; the last one computes the result.
        shape, dtype: of the result.
    """

    steps: tuple[tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def shapes(self, *sources: Tensor) -> Shapes:
        return [(self.shape, self.dtype)]

    def make(self, *sources: Tensor) -> list[Tensor]:
        values = list(sources)

        def resolve(argument: Any) -> Any:
            if isinstance(argument, Value):
                return values[argument.number]
            return [resolve(part) for part in argument] if isinstance(argument, tuple) else argument

        for name, args, kwargs in self.steps:
            op = attrgetter(name)(torch.ops)
            values.append(op(*map(resolve, args), **{key: resolve(value) for key, value in kwargs}))
        return [values[-1].contiguous()]


@dataclass(frozen=True)
class Part:
    """Some of the tensors of a recipe.

    Attributes:
        places: the indices of the tensors.
    """

    recipe: Recipe
    places: tuple[int, ...]

    def shapes(self, *sources: Tensor) -> Shapes:
        shapes = self.recipe.shapes(*sources)
        return [shapes[place] for place in self.places]

    def make(self, *sources: Tensor) -> list[Tensor]:
        tensors = self.recipe.make(*sources)
        return [tensors[place] for place in self.places]


@dataclass(frozen=True)
class Composed:
    """A recipe with sources that other recipes compute; these are freed afterwards.

    Attributes:
        outer: the recipe.
        inner: for each source of `outer`, None for the next source of the composition, or (a recipe of one tensor, the number of
            its sources).
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
        remaining = iter(sources)
        for step in self.inner:
            yield next(remaining) if step is None else make(step[0], *islice(remaining, step[1]))


@dataclass(frozen=True)
class FoldedNorm:
    """The weight and bias of a convolution with the batch norm after it folded in (Ioffe & Szegedy 2015, arXiv:1502.03167).

    The sources are the weight, the norm's mean and variance, then those that exist of the bias and the norm's weight and bias.

    Attributes:
        eps: added to the variance.
        given: whether the bias, the norm's weight and the norm's bias exist.
    """

    eps: float
    given: tuple[bool, bool, bool]

    def shapes(self, *sources: Tensor) -> Shapes:
        weight = sources[0]
        shape = tuple(int(size) for size in weight.shape)
        return [(shape, weight.dtype), (shape[:1], weight.dtype)]

    def make(self, *sources: Tensor) -> list[Tensor]:
        weight, mean, variance, *optional = (source.float() for source in sources)
        parts = iter(optional)
        bias, scale, shift = (next(parts) if exists else None for exists in self.given)
        factor = torch.rsqrt(variance + self.eps) * (1.0 if scale is None else scale)
        folded_bias = ((0.0 if bias is None else bias) - mean) * factor + (0.0 if shift is None else shift)
        folded_weight = weight * factor.reshape(-1, *[1] * (weight.dim() - 1))
        return [folded_weight.to(sources[0].dtype), folded_bias.to(sources[0].dtype)]


class Derived:
    """The tensors of a recipe, and the fingerprint of their sources.

    Attributes:
        sources: the fingerprint of the sources.
        tensors: the result.
    """

    def __init__(self, recipe: Recipe, sources: Sequence[Tensor]) -> None:
        self.sources = Fingerprint(sources)
        with torch.no_grad():
            self.tensors = recipe.make(*(source.detach() for source in sources))


_lock = RLock()
# first source -> {(recipe, ids of the other sources): Derived}. Weak on both sides: results, which reference their sources, end
# with the graphs that use them.
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def derive(recipe: Recipe, sources: Sequence[Tensor]) -> Derived:
    """Return the tensors of `recipe` for `sources`, shared by all graphs, and computed again if a source has changed."""
    with _lock:
        of_first = _known.setdefault(sources[0], weakref.WeakValueDictionary())
        # The id of a source cannot be reused while its result is in use, which references it.
        key = (recipe, *(id(source) for source in sources[1:]))
        derived: Derived | None = of_first.get(key)
        if derived is None or not derived.sources.matches(sources):
            derived = of_first[key] = Derived(recipe, sources)
        return derived
