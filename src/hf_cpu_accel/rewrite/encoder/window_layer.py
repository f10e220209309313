"""Level two for encoder layers that attend within windows of an image (Swin, Liu et al. 2021, arXiv:2103.14030): one op call, which
reads the tokens from where they lie instead of rolling the image, cutting it up and putting it together again.

What a layer is made of is guessed from a trace, as for any encoder layer. Which token belongs to which window, and what is added to
the scores, is seen in what the layer's own forward hands to its projections and to attention, once per size of image; and the whole
is proved on that size. A size that does not fit the windows (the layer pads it) keeps the own forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.packing.linear import QUANTISED
from hf_cpu_accel.patching.fused_module import Mixed, Reference, fused_layer
from hf_cpu_accel.patching.hooks import own_forward
from hf_cpu_accel.patching.journal import swap_module
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.providers.layer import own_everywhere
from hf_cpu_accel.rewrite.core.context import Context, refusal_to_swap
from hf_cpu_accel.rewrite.core.foreign import attempt, call_foreign
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.core.refusal import Refusal, Refused, required
from hf_cpu_accel.rewrite.core.shadow import Shadow
from hf_cpu_accel.rewrite.core.tolerance import ENCODER_LAYER
from hf_cpu_accel.rewrite.core.verify import computes_alike
from hf_cpu_accel.rewrite.encoder.expected import is_layer
from hf_cpu_accel.rewrite.encoder.match import (
    gains_of,
    guesses,
    hidden_states_of,
    known_parameters,
)
from hf_cpu_accel.rewrite.encoder.parts import EncoderLayerParts
from hf_cpu_accel.rewrite.encoder.trace import LayerTrace
from hf_cpu_accel.rewrite.encoder.window_match import Run, Windows, seen
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.norm.match import identify_norm
from hf_cpu_accel.runtime.fork import new_lock

STRUCTURE = "window encoder layer"

_ENCODER_LAYER = torch.ops.hf_cpu_accel.encoder_layer.default
_PARAMETERS = ("hidden_states", "input_dimensions")
# The side of the image that tells the size of a window: larger than most windows, since a layer makes those fit a smaller one.
_SIDE = 32
# What one layer keeps of windows and their biases. An image that takes more (Swin-T's first stage beyond 650 x 650) is not learnt.
_BYTES = 16 << 20
_SIZES = 256


_NEW, _MET = (Windows(torch.empty(0, 0, dtype=torch.int32), None) for _ in range(2))
_learning = new_lock()


class FusedWindowLayer(Mixed):
    """Mixed into the layer's own class; called as `layer(hidden_states [B, height * width, C], (height, width), *switches)`.

    The children, hooks and attributes are those of the original, whose own forward it runs where somebody looks at what is inside,
    where more is asked for than hidden states, while a graph is traced, and for the first image of a size.

    Attributes:
        _tables, _numbers: names of the parameters and attributes that say how windows are cut and what is added to their scores.
        _known: what was learnt, by size, switches, and the state of those; `_MET` for what was seen once.
    """

    _parts: EncoderLayerParts
    _tuple: int | None
    _tables: tuple[str, ...]
    _numbers: tuple[str, ...]
    _bound: tuple[Any, ...] | None
    _known: dict[Any, Windows | None]

    def forward(self, hidden_states: Tensor, input_dimensions: Any, *args: Any, **kwargs: Any) -> Any:
        """-> as the original."""
        windows = None
        if self._serves(hidden_states, args, kwargs):
            check_inference(self, hidden_states)
            forward = self._original_class.forward
            call = (tuple(input_dimensions), *args, *kwargs.items())
            windows = self._windows(
                hidden_states, call, lambda image: forward(self, image, input_dimensions, *args, **kwargs)
            )
        if windows is None:
            return self._original_class.forward(self, hidden_states, input_dimensions, *args, **kwargs)
        bound = self._bound
        if bound is None:
            bound = self._bound = self._parts.weights(narrow=True).arguments()
        output = _compute(hidden_states, windows, bound)
        return output if self._tuple is None else (output, *(None,) * (self._tuple - 1))

    def reference_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reference | None:
        """Of an image whose size was seen before; the first of a size runs the own forward."""
        if len(args) < 2 or not self._serves(args[0], args[2:], kwargs):
            return None
        key = self._key(args[0], (tuple(args[1]), *args[2:], *kwargs.items()))
        return None if self._known.get(key) is None else Reference(args, kwargs)

    def _serves(self, hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if (
            hidden_states.dim() != 3
            or not len(hidden_states)
            or torch.compiler.is_compiling()
            or torch.jit.is_tracing()
        ):
            return False
        switches = (*args, *kwargs.values())
        if any(value is not None and type(value) is not bool for value in switches) or self.is_watched:
            return False
        return own_everywhere(self._parts.linears, hidden_states.shape[0] * hidden_states.shape[1])

    def _windows(self, hidden_states: Tensor, call: tuple[Any, ...], run: Run) -> Windows | None:
        """Those of such an image, learnt from the own forward when a size comes again; None if the op cannot do it, or not yet."""
        key = self._key(hidden_states, call)
        found = self._known.get(key, _NEW)
        if found is _NEW:
            self._keep(key, _MET)
            return None
        if found is not _MET:
            return found
        if not _learning.acquire(blocking=False):  # the hooks of two would see each other
            return None
        try:
            windows = self.learn(hidden_states[:1], run)
        finally:
            _learning.release()
        self._keep(self._key(hidden_states, call), windows)  # anew: a layer fits itself to a small image
        return windows

    def _key(self, hidden_states: Tensor, call: tuple[Any, ...]) -> Any:
        state = vars(self)
        numbers = [state[name] for name in self._numbers]
        tables = [self.get_parameter(path) for path in self._tables]
        return hidden_states.shape[1], hidden_states.dtype, call, *numbers, *map(_state, tables)

    def _keep(self, key: Any, windows: Windows | None) -> None:
        """In a dictionary of its own, since other threads may read this one."""
        kept = self._known
        size = sum(known.nbytes for known in (*kept.values(), windows) if known is not None)
        self._known = {**(kept if size <= _BYTES and len(kept) < _SIZES else {}), key: windows}

    def learn(self, hidden_states: Tensor, run: Run) -> Windows | None:
        """The windows of one image like `hidden_states` [1, L, C], if with them the op does what `run` does.

        Nothing is narrowed for that: what passes between the ops is then rounded alike.
        """
        generator = torch.Generator().manual_seed(0)
        image = torch.randn(hidden_states.shape, generator=generator).to(hidden_states.dtype)
        with torch.no_grad():
            expected, windows = seen(self, self._parts, image, run)
            if windows is None or windows.nbytes > _BYTES:
                return None
            output = _compute(image, windows, self._parts.weights(narrow=False).arguments())
        return windows if _alike(self._parts, output, expected, image.dtype) else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedWindowLayer:
        super()._apply(fn, recurse)
        self._bound, self._known = None, {}  # they hold copies of the biases
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": {}}


def _state(table: Tensor) -> tuple[int, int, Any]:
    """Another one after the parameter was exchanged or written to; by its few values where versions are not counted."""
    values = table.detach().float().numpy().tobytes() if table.is_inference() else table._version
    return id(table), table.data_ptr(), values


def _compute(hidden_states: Tensor, windows: Windows, bound: tuple[Any, ...]) -> Tensor:
    rows = windows.rows
    if len(hidden_states) > 1:
        starts = torch.arange(0, hidden_states.shape[0] * hidden_states.shape[1], hidden_states.shape[1])
        rows = (starts.int()[:, None, None] + rows).flatten(0, 1)
    output: Tensor = _ENCODER_LAYER(hidden_states, None, windows.bias, None, None, None, 0, *bound, rows)
    return output


def _alike(parts: EncoderLayerParts, output: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """dtype: of the activations."""
    quantises = any(linear.packed.dtype in QUANTISED for linear in parts.linears)
    return computes_alike(output, expected, ENCODER_LAYER.of(dtype), quantises=quantises)


def fuse_window_layers(context: Context) -> list[PlanItem]:
    """Fuse every layer of the model that is one. To be called when the linears are packed and attention is ours."""
    items: list[PlanItem] = []
    for path, layer in list(context.root.named_modules()):
        if not _may_be_layer(layer) or not context.slots[id(layer)]:
            continue
        fused = attempt(path, _looked_at, layer, path, context)
        if not isinstance(fused, Refusal):
            swap_module(context.journal, context.slots[id(layer)], fused)
            items.append(PlanItem(path, STRUCTURE, "encoder_layer", context.dtype, 0, reason=None))
        elif is_layer(context.root, path):
            context.refuse(path, STRUCTURE, fused)
    return items


def _looked_at(layer: nn.Module, path: str, context: Context) -> FusedWindowLayer | Refusal:
    reason = refusal_to_swap(layer, path, context)
    if reason is None and any(context.skipped(f"{path}.{name}") for name, _ in layer.named_modules() if name):
        reason = "skip_modules"
    if reason is None and any(own_forward(part) is not None for part in layer.modules()):
        reason = "the forward of a module in it was replaced"
    return _fused(layer) if reason is None else Refusal(reason)


def _may_be_layer(module: nn.Module) -> bool:
    if isinstance(module, FusedWindowLayer) or tuple(inspect.signature(module.forward).parameters)[:2] != (
        _PARAMETERS
    ):
        return False
    linears = sum(isinstance(child, PackedLinear) for child in module.modules())
    norms = sum(identify_norm(child) is not None for child in module.modules())
    return 4 <= linears <= 6 and norms == 2


def _fused(layer: nn.Module) -> FusedWindowLayer | Refusal:
    """The layer with the fused forward, if on small images that does what the layer does.

    Raises:
        Refused: it does not take what such a layer takes.
    """
    width = next(m.in_features for m in layer.modules() if isinstance(m, PackedLinear))
    dtype = next((p.dtype for p in layer.parameters() if p.is_floating_point()), torch.float32)
    refusal = Refusal(
        "its linears and norms are not those of attention in windows and a feed-forward network"
    )
    shadow = Shadow(layer)
    tried = shadow.module
    with torch.no_grad(), shadow.running():
        side = _side(tried, width, dtype)
        image = torch.randn(2, side * side, width, generator=torch.Generator().manual_seed(1)).to(dtype)
        expected = hidden_states_of(_run(tried, side, image))
        for parts, outputs in _readings(tried, side, width, dtype):
            fuse: Callable[..., FusedWindowLayer] = partial(
                fused_layer,
                FusedWindowLayer,
                _tuple=outputs,
                _tables=tuple(_bias_tables(tried, parts)),
                _numbers=tuple(name for name, value in vars(layer).items() if type(value) is int),
                _bound=None,
            )
            fused = fuse(tried, _parts=parts, _known={})
            windows = fused.learn(image[:1], partial(_run, tried, side))
            if windows is None:
                refusal = Refusal("it does not cut an image into windows as a permutation of its tokens")
                continue
            output = _compute(image, windows, parts.weights(narrow=False).arguments())
            if _alike(parts, output, expected, dtype):
                return fuse(layer, _parts=parts.moved(shadow.original, gains_of(layer)), _known={})
            refusal = Refusal("it computes something else than its linears, norms and windows suggest")
    return refusal


class _Stop(BaseException):
    """What was to be seen was seen, and no `except Exception` on the way is to take it for an error."""


def _side(layer: nn.Module, width: int, dtype: torch.dtype) -> int:
    """Of an image of two by two windows."""
    sizes: list[int] = []

    def look(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        sizes.append(args[0].shape[-2])
        raise _Stop

    first = next(m for m in layer.modules() if isinstance(m, PackedLinear))
    before = {name: value for name, value in vars(layer).items() if type(value) is int}
    hook = first.register_forward_pre_hook(look)
    try:
        _run(layer, _SIDE, torch.zeros(1, _SIDE * _SIDE, width, dtype=dtype))
    except _Stop:
        pass
    finally:
        hook.remove()
        vars(layer).update(before)  # it may have fitted itself to the image
    if not sizes:
        raise Refused(Refusal("it does not call its first linear"))
    return 2 * round(sizes[0] ** 0.5)


def _readings(
    layer: nn.Module, side: int, width: int, dtype: torch.dtype
) -> Iterator[tuple[EncoderLayerParts, int | None]]:
    """What the layer may be made of, and of how many values the tuple is that it returns."""
    trace = LayerTrace(layer)
    image = torch.randn(1, side * side, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    with trace:
        output = _run(layer, side, image)
    outputs = len(output) if isinstance(output, tuple) else None
    if outputs is not None and any(value is not None for value in output[1:]):
        raise Refused(Refusal("it returns more than hidden states"))
    if len(trace.attention) != 1:
        raise Refused(Refusal(f"attention was seen {len(trace.attention)} times in it, not once"))
    for parts in guesses(layer, trace):
        tables = [layer.get_parameter(path) for path in _bias_tables(layer, parts)]
        if all(table.dim() == 2 and table.shape[1] == parts.attention.heads for table in tables):
            yield replace(parts, relative=None), outputs


def _run(layer: nn.Module, side: int, hidden_states: Tensor) -> Any:
    """
    Raises:
        Refused: the layer does not take that, or makes no hidden states of it.
    """
    output = required(call_foreign(layer, hidden_states, (side, side)))
    states = hidden_states_of(output)
    if not isinstance(states, Tensor) or states.shape != hidden_states.shape:
        raise Refused(Refusal("it does not return hidden states as it takes them"))
    return output


def _bias_tables(layer: nn.Module, parts: EncoderLayerParts) -> list[str]:
    """Paths of the parameters of no linear and no norm: of the bias for the place of a key beside the query."""
    known = known_parameters(layer) | {id(gain) for gain in parts.gains or ()}
    return [path for path, parameter in layer.named_parameters() if id(parameter) not in known]
