"""Layer fusion for encoder layers that attend within windows of an image (Swin, Liu et al. 2021, arXiv:2103.14030): one op call,
which reads tokens in place instead of rolling, partitioning and merging the image.

The parts of a layer are matched from a trace, as for any encoder layer. The windows and the biases of the scores come from the
inputs of its projections and of attention in its own forward, once per size of image. The result is verified on that size. A
size that does not fit the windows (the layer pads it) runs the own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.check import compare
from hf_cpu_accel.ops.encoder_layer import BoundEncoderLayer, EncoderInputs, bound_encoder_layer
from hf_cpu_accel.packing.linear import QUANTIZED
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, Reference
from hf_cpu_accel.providers.layer import native_everywhere
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.encoder.parts import EncoderLayerParts
from hf_cpu_accel.rewrite.encoder.window_match import Run, Windows, trace_windows
from hf_cpu_accel.runtime.fork import new_lock
from hf_cpu_accel.runtime.tracing import is_tracing
from hf_cpu_accel.tolerance import ENCODER_LAYER, FEW_ROWS

# Limit of the windows and biases of one layer. An image that needs more (Swin-T's first stage beyond 650 x 650) is skipped.
_BYTES = 16 << 20
_SIZES = 256


_NEW, _MET = (Windows(torch.empty(0, 0, dtype=torch.int32), None) for _ in range(2))
_learning = new_lock()


class FusedWindowLayer(FusedModuleMixin):
    """Mixed into the layer's own class; called as `layer(hidden_states [B, height * width, C], (height, width), *switches)`.

    The children, hooks and attributes are those of the original. Its own forward runs where hooks read values inside, where the
    caller asks for more than hidden states, while a graph is traced, and for the first image of a size.

    Attributes:
        _tables, _followed: names of the parameters and attributes that determine windows and biases. A layer adapts the numbers
            to small images itself.
        _known: the windows by size, switches, and the state of those; `_MET` for sizes that were seen once.
    """

    _parts: EncoderLayerParts
    _tuple: int | None
    _tables: tuple[str, ...]
    _bound: BoundEncoderLayer | None
    _known: dict[Any, Windows | None]

    def forward(self, hidden_states: Tensor, input_dimensions: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the original returns."""
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
            bound = self._bound = self._parts.weights(bf16_intermediates=True).bind()
        output = compute(hidden_states, windows, bound)
        return output if self._tuple is None else (output, *(None,) * (self._tuple - 1))

    def reference_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reference | None:
        """Return the call for an image whose size was seen before; the first of a size runs the own forward."""
        if len(args) < 2 or not self._serves(args[0], args[2:], kwargs):
            return None
        key = self._key(args[0], (tuple(args[1]), *args[2:], *kwargs.items()))
        return None if self._known.get(key) is None else Reference(args, kwargs)

    def _serves(self, hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if hidden_states.dim() != 3 or not len(hidden_states) or is_tracing():
            return False
        switches = (*args, *kwargs.values())
        if any(value is not None and type(value) is not bool for value in switches) or self.is_watched:
            return False
        return native_everywhere(self._parts.linears, hidden_states.shape[0] * hidden_states.shape[1])

    def _windows(self, hidden_states: Tensor, call: tuple[Any, ...], run: Run) -> Windows | None:
        """Return the windows of the image, found in the own forward when a size occurs again, or None if the op does not support
        it, or not yet."""
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
        self._keep(
            self._key(hidden_states, call), windows
        )  # a new key: a layer adapts itself to a small image
        return windows

    def _key(self, hidden_states: Tensor, call: tuple[Any, ...]) -> Any:
        state = vars(self)
        numbers = [state[name] for name in self._followed]
        tables = [self.get_parameter(path) for path in self._tables]
        return hidden_states.shape[1], hidden_states.dtype, call, *numbers, *map(_state, tables)

    def _keep(self, key: Any, windows: Windows | None) -> None:
        """Store windows in a new dictionary, since other threads may read the old one."""
        kept = self._known
        size = sum(known.nbytes for known in (*kept.values(), windows) if known is not None)
        self._known = {**(kept if size <= _BYTES and len(kept) < _SIZES else {}), key: windows}

    def learn(self, hidden_states: Tensor, run: Run) -> Windows | None:
        """Return the windows of an image like `hidden_states` [1, L, C], if the op with them agrees with `run`, or None.

        Nothing is narrowed for this comparison: intermediate values are then rounded alike.
        """
        generator = torch.Generator().manual_seed(0)
        image = torch.randn(hidden_states.shape, generator=generator).to(hidden_states.dtype)
        with torch.no_grad():
            expected, windows = trace_windows(self, self._parts, image, run)
            if windows is None or windows.nbytes > _BYTES:
                return None
            output = compute(image, windows, self._parts.weights(bf16_intermediates=False).bind())
        return windows if alike(self._parts, output, expected, image.dtype) else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedWindowLayer:
        super()._apply(fn, recurse)
        self._bound, self._known = None, {}  # they hold copies of the biases
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": {}}


def _state(table: Tensor) -> tuple[int, int, Any]:
    """Return a key that changes when the parameter is replaced or written to; by its values where versions are not counted."""
    values = table.detach().float().numpy().tobytes() if table.is_inference() else table._version
    return id(table), table.data_ptr(), values


def compute(hidden_states: Tensor, windows: Windows, bound: BoundEncoderLayer) -> Tensor:
    rows = windows.rows
    if len(hidden_states) > 1:
        starts = torch.arange(0, hidden_states.shape[0] * hidden_states.shape[1], hidden_states.shape[1])
        rows = (starts.int()[:, None, None] + rows).flatten(0, 1)
    return bound_encoder_layer(hidden_states, EncoderInputs(mask=windows.bias), bound, rows)


def alike(parts: EncoderLayerParts, output: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the outputs agree.

    Args:
        dtype: of the activations.
    """
    quantizes = any(linear.packed.dtype in QUANTIZED for linear in parts.linears)
    return compare(output, expected).within(ENCODER_LAYER.of(dtype), few=FEW_ROWS if quantizes else 1.0)
