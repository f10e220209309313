"""The decode steps of a model: some are captured, and once two of them predict a third, the rest are replayed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_cpu_accel.generate.replay.cached_layers import CachedLayers
from hf_cpu_accel.generate.replay.capture import Capture, capture
from hf_cpu_accel.generate.replay.limits import Limits
from hf_cpu_accel.generate.replay.program import Program
from hf_cpu_accel.generate.replay.sources import CannotReplay
from hf_cpu_accel.guard.modules import has_global_hooks, instance_forward
from hf_cpu_accel.patching.hooks import forward_hooks, has_foreign_hook

_CAPTURES = 3  # two of them must predict the third
_MOST_RESTARTS = 4
_MOST_CAPTURES = 6  # the first steps may differ: values are computed once, or a storage grows
_log = logging.getLogger(__name__)


class DecodeSteps:
    """Calls of `model` with as many new tokens of each sequence every time, and the same cache.

    The first calls run the model and capture the ops that it calls. These ops are the same in every step, except for the tokens,
    the positions and the place in the cache, which grow with the text. Later calls run the captured ops alone, which takes a
    small model two thirds of the time.

    The model runs again for some steps where the text reaches one of its `Limits`, where weights change, or where the cache is not
    as the last step left it. It runs for good where hooks are registered, or where the arguments of its call change. A module that
    is exchanged during generation counts from the next text on.

    Args:
        length: of the text so far, its first new token among them.
        tokens: how many more there will be at most. A few are not worth it.
        new_tokens: of each sequence in one call.
    """

    def __init__(self, model: Any, cache: Any, length: int, tokens: int | None, new_tokens: int = 1) -> None:
        self._model, self._new_tokens = model, new_tokens
        self._layers = CachedLayers(cache)
        # Tokens before the step; there may be more in the cache than in the text, such as embeddings.
        self._length = max(length - 1, self._layers.longest())
        self._not_in_text = self._length - (length - 1)
        self._captures_left = _MOST_CAPTURES if _can_be_captured(model, tokens) else 0
        self._restarts_left = _MOST_RESTARTS
        self._limits = Limits(model.config) if self._captures_left else None
        self._captures: list[tuple[int, Capture]] = []  # and the length before each
        self._program: Program | None = None
        self._is_tried = False  # whether the program agrees with the model
        self._first = 0  # length before the first step of the program
        self._limit: int | None = None
        self._handles = RemovableHandle.next_id
        self._outputs: Any = None  # of the last call of the model that was captured
        self._inputs: dict[str, Any] = {}  # its arguments

    @property
    def is_settled(self) -> bool:
        """Return whether the next call takes about as long as all later ones."""
        if self._program is None:
            return not self._captures_left
        return self._is_tried or not self._program.is_repeatable

    def __call__(self, inputs: Mapping[str, Any], length: int | None = None) -> Any:
        """Return `model(**inputs, return_dict=True)`; replayed steps update only its logits.

        Args:
            length: of the text before the new tokens, or None if they follow those of the last call.
        """
        if length is None:
            length = self._length
        else:
            length += self._not_in_text
        self._length = length + self._new_tokens
        if self._limit is not None and length + self._new_tokens >= self._limit:
            self._begin_again()
            if length > self._limit:
                self._limit = None
        elif self._program is not None:
            if not self._is_as_captured(inputs):
                self._stop("hooks were registered, or the arguments of its call changed")
            elif not self._is_tried and self._program.is_repeatable:
                return self._try(self._program, inputs, length)
            elif (logits := self._program.run(inputs, length - self._first)) is not None:
                self._outputs.logits = logits
                return self._outputs
            elif self._restarts_left:
                self._restarts_left -= 1
                self._begin_again()
            else:
                self._stop("its captured steps keep changing")
        elif self._captures_left:
            return self._captured(inputs, length)
        return self._model(**inputs, return_dict=True)

    def replayed_ops(self) -> frozenset[Any]:
        """Return the ops that are replayed instead of calling the model; none before the program has been tried."""
        return frozenset() if self._program is None or not self.is_settled else self._program.ops

    def _captured(self, inputs: Mapping[str, Any], length: int) -> Any:
        if self._limit is None and self._limits is not None:
            self._limit = self._limits.after(length)
        self._captures_left -= 1
        outputs, captured = capture(self._model, inputs, self._layers, self._new_tokens)
        if isinstance(captured, CannotReplay):
            self._stop(str(captured))
            return outputs
        self._outputs, self._inputs = outputs, dict(inputs)
        self._captures = [*self._captures, (length, captured)][-_CAPTURES:]
        if len(self._captures) == _CAPTURES:
            (begin, first), (middle, second), (_, third) = self._captures
            try:
                program = Program(first, second, middle - begin, self._layers)
                if not program.is_of(third, length - begin):
                    raise CannotReplay("two captured steps do not predict the third")
                self._program, self._first, self._captures = program, begin, []
                self._is_tried = False
            except CannotReplay as refusal:
                if not self._captures_left:
                    self._stop(str(refusal))
        return outputs

    def _try(self, program: Program, inputs: Mapping[str, Any], length: int) -> Any:
        """Run the model and the program, and keep the program if both agree. They differ if code other than the captured ops
        fills tensors."""
        logits = program.run(inputs, length - self._first, keeps=False)
        outputs = self._model(**inputs, return_dict=True)
        if logits is not None and torch.equal(logits, outputs.logits):
            self._is_tried = True
        else:
            self._stop("its replayed ops give a different result")
        return outputs

    def _is_as_captured(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether the model would act as in the captured steps, as far as its arguments and hooks show."""
        if self._handles != RemovableHandle.next_id:
            if _is_watched(self._model):
                return False
            self._handles = RemovableHandle.next_id
        if inputs.keys() != self._inputs.keys() or torch.is_autocast_enabled("cpu"):
            return False
        for name, then in self._inputs.items():
            now = inputs[name]
            if now is then:
                continue
            if isinstance(now, Tensor) and isinstance(then, Tensor):
                if now.dtype != then.dtype:
                    return False
            elif type(now) is not type(then) or not isinstance(now, bool | int | str) or now != then:
                return False
        return True

    def _begin_again(self) -> None:
        """Capture the steps again, from a later one on."""
        if self._program is not None or self._captures_left:
            self._program, self._captures, self._captures_left = None, [], _MOST_CAPTURES

    def _stop(self, reason: str) -> None:
        """Call the model from now on."""
        _log.debug("decode steps of %s are not replayed: %s", type(self._model).__name__, reason)
        self._program, self._captures, self._captures_left, self._limit = None, [], 0, None


def _can_be_captured(model: nn.Module, tokens: int | None) -> bool:
    worth = tokens is None or tokens > 2 * _MOST_CAPTURES
    as_usual = not model.training and not torch.is_autocast_enabled("cpu")
    return worth and as_usual and not _is_watched(model) and not any(map(_is_compiled, model.modules()))


def _is_compiled(module: nn.Module) -> bool:
    """Return whether the user compiled the module with torch, which must not be traced again below a mode."""
    return module._compiled_call_impl is not None or hasattr(
        instance_forward(module), "_torchdynamo_orig_callable"
    )


def _is_watched(model: nn.Module) -> bool:
    return has_global_hooks() or any(
        has_foreign_hook(hooks) for module in model.modules() for hooks in forward_hooks(module) if hooks
    )
