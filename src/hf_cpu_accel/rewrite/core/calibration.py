"""Convert the examples of a user (texts, dictionaries of inputs or a data loader) into calls of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hf_cpu_accel.config import CPUAccelConfig
from hf_cpu_accel.hosts.arguments import parameters_of
from hf_cpu_accel.hosts.root import Root
from hf_cpu_accel.patching.float16_values import to_float32

# Limits for texts: tokens of a window, and parallel forwards, each in its own thread.
_WINDOW, _BATCHES = 512, 8
_MOST_BATCHES = 64  # of inputs
NO_EXAMPLES = "dtype='int8-static' needs calibration= with example inputs; dtype='int8' needs none"
ACCEPTED = "a list of texts, a list of input dictionaries, or a data loader of dictionaries or tensors"


@dataclass(frozen=True, eq=False)
class Example:
    """The arguments of one call.

    Attributes:
        mask: bool [batch, tokens], which tokens are no padding; None where nothing says so.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mask: Tensor | None = None

    @property
    def batch(self) -> int:
        """Return the batch size of the example."""
        given = [*self.args, *self.kwargs.values()]
        given += [value for part in self.args if isinstance(part, Mapping) for value in part.values()]
        return next((len(value) for value in given if isinstance(value, Tensor) and value.dim() > 1), 1)

    def call(self, model: nn.Module) -> Any:
        args = [dict(arg) if isinstance(arg, Mapping) else arg for arg in self.args]  # hosts write into them
        return model(*args, **self.kwargs)

    def rows(self, input: Tensor) -> Tensor:
        """Return the input of a linear, [..., K], as [rows, K], without rows of padding if there is a row for each token."""
        if self.mask is not None and input.shape[:-1] == self.mask.shape:
            return input[self.mask]
        return input.reshape(-1, input.shape[-1])


def requested_examples(
    calibration: object, target: object, roots: Sequence[Root], settings: CPUAccelConfig, tokenizer: Any
) -> tuple[Example, ...]:
    """Return the calls to calibrate a target on.

    Args:
        calibration: the argument of `accelerate_for_cpu`; None for no calls.
        target: the target.
        roots: its models.
        settings: the settings, which decide whether calls are needed.
        tokenizer: for texts, or None for the tokenizer of the target.

    Raises:
        TypeError: see `calibration_examples`.
        ValueError: see `calibration_examples`; or the settings need calls or have no use for them.
    """
    static = settings.dtype == "int8-static"
    if calibration is None:
        if static:
            raise ValueError(NO_EXAMPLES)
        return ()
    rounded = static or "int4" in (settings.dtype, *dict(settings.dtypes).values())
    if settings.accuracy is None and not rounded:
        raise ValueError(
            f"calibration is not supported with dtype={settings.dtype!r}: use dtype='int4' or 'int8-static', or leave it out"
        )
    if len(roots) != 1:
        raise ValueError(
            f"calibration supports one model, but this {type(target).__name__} has {len(roots)}: accelerate its models one by one"
        )
    return calibration_examples(calibration, roots[0].module, tokenizer or getattr(target, "tokenizer", None))


def calibration_examples(
    calibration: object,
    model: nn.Module,
    tokenizer: Any = None,
    *,
    window: int = _WINDOW,
    batches: int = _BATCHES,
) -> tuple[Example, ...]:
    """Return the examples in `calibration` as calls of `model`.

    Args:
        calibration: ACCEPTED.
        tokenizer: of transformers; for texts.
        window, batches: of texts, the most tokens of one, and how many examples to make.

    Raises:
        TypeError: it is something else, or holds something else.
        ValueError: it is empty, holds texts without a tokenizer, or too many batches.
    """
    if isinstance(calibration, str | bytes | Mapping | Tensor) or not isinstance(calibration, Iterable):
        raise TypeError(f"calibration of type {type(calibration).__name__} is not supported; pass {ACCEPTED}")
    rest = iter(calibration)
    items = list(islice(rest, _MOST_BATCHES + 1))  # a loader may have a whole dataset
    if not items:
        raise ValueError(f"calibration is empty; pass {ACCEPTED}")
    if isinstance(items[0], str):
        items.extend(rest)
    elif len(items) > _MOST_BATCHES:
        raise ValueError(
            f"calibration has more than {_MOST_BATCHES} batches, and all stay in memory: pass fewer, larger batches"
        )
    if all(isinstance(item, str) for item in items):
        return _of_texts(items, model, tokenizer, window, batches)
    return tuple(_of_inputs(item, model) for item in items)


def fitting(example: Example, is_float16: bool) -> Example:
    """Return `example` with float32 in place of float16 if the model has float16 weights, which are float32 by now."""
    if not is_float16:
        return example
    return Example(to_float32(example.args), to_float32(example.kwargs), example.mask)


def call(number: int, example: Example, model: nn.Module) -> None:
    """Call `model` with batch `number` of the calibration.

    Raises:
        ValueError: the model does not take it.
    """
    try:
        example.call(model)
    except Exception as error:
        raise ValueError(
            f"calibration: the model raised an error for batch {number}: {type(error).__name__}: {error}"
        ) from error


def _of_inputs(item: object, model: nn.Module) -> Example:
    if isinstance(item, Tensor):
        return Example((item,), {})
    if not isinstance(item, Mapping):
        raise TypeError(f"calibration has an item of type {type(item).__name__}; pass {ACCEPTED}")
    inputs = dict(item)
    mask = inputs.get("attention_mask")
    mask = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
    # A Sequential, as SentenceTransformer is one, takes the features as one argument.
    return Example((inputs,), {}, mask) if isinstance(model, nn.Sequential) else Example((), inputs, mask)


def _of_texts(
    texts: Sequence[str], model: nn.Module, tokenizer: Any, longest: int, batches: int
) -> tuple[Example, ...]:
    if tokenizer is None:
        raise ValueError(
            "calibration has texts, but the target has no tokenizer: pass tokenizer=, or dictionaries of inputs"
        )
    limits = (
        tokenizer.model_max_length,
        getattr(getattr(model, "config", None), "max_position_embeddings", None),
    )
    longest = min([longest, *(limit for limit in limits if isinstance(limit, int) and limit > 0)])
    accepted = tokenizer.model_input_names
    if not isinstance(model, nn.Sequential):
        accepted = [name for name in accepted if name in parameters_of(model.forward)]
    windows = [window for text in texts for window in _windows(text, tokenizer, accepted, longest)]
    if not windows:
        raise ValueError("calibration: the texts have no tokens; pass longer texts")
    windows.sort(key=lambda window: len(window["input_ids"]))  # little padding
    step = -(-len(windows) // batches)
    return tuple(
        _of_inputs(_side_by_side(windows[start : start + step], tokenizer), model)
        for start in range(0, len(windows), step)
    )


def _windows(text: str, tokenizer: Any, accepted: Sequence[str], longest: int) -> list[dict[str, Tensor]]:
    """Return the inputs of a text with these names, split into windows of at most `longest` tokens."""
    fast = bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(text, truncation=True, max_length=longest, return_overflowing_tokens=fast)
    names = [name for name in accepted if name in encoded]
    several = fast or isinstance(encoded["input_ids"][0], list)
    found = [
        {name: torch.tensor(encoded[name][number] if several else encoded[name]) for name in names}
        for number in range(len(encoded["input_ids"]) if several else 1)
    ]
    return [window for window in found if len(window["input_ids"])]


def _side_by_side(windows: Sequence[dict[str, Tensor]], tokenizer: Any) -> dict[str, Tensor]:
    """Return one batch of the windows, padded on the right."""
    filling = {"input_ids": tokenizer.pad_token_id or 0}
    batch = {
        name: pad_sequence([window[name] for window in windows], True, filling.get(name, 0))
        for name in windows[0]
    }
    lengths = torch.tensor([len(window["input_ids"]) for window in windows])
    batch["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    return batch
