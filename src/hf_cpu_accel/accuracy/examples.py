"""Convert the examples of the user, or built-in examples, to calls of each model of the target."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.accuracy.built_in import built_in_calls, takes_ids
from hf_cpu_accel.accuracy.calls import Call
from hf_cpu_accel.accuracy.preprocessors import Preprocessors
from hf_cpu_accel.accuracy.texts import built_in_texts
from hf_cpu_accel.hosts.find import Root
from hf_cpu_accel.hosts.models import is_model
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.refusal import Refusal

ACCEPTED = (
    "a list of texts, images, audio (arrays of one dimension), dicts of inputs, tensors or tuples of tensors, or an iterable of "
    "them such as a DataLoader"
)
_MOST = 64  # examples
_MOST_CALLS = 6  # per model of a pipeline
_STEPS = 2  # denoising steps of a diffusion pipeline


@dataclass(frozen=True)
class Examples:
    """The calls of the models of a target.

    Attributes:
        calls: the calls of each model, in the order of the models; empty for models that the target did not call.
        description: description of the examples.
        called: the module to call, whose outputs are compared; None for each model itself.
        default_dtype: dtype of models without calls.
    """

    calls: tuple[list[Call], ...]
    description: str
    called: nn.Module | None = None
    default_dtype: str = "auto"


def check_examples(examples: object, accuracy: float | None) -> None:
    """Check the argument `examples`.

    Raises:
        TypeError: a value that is not a list or an iterable.
        ValueError: an empty list, or examples without `accuracy`.
    """
    if examples is None:
        return
    if isinstance(examples, str | bytes | Mapping | Tensor) or not isinstance(examples, Iterable):
        raise TypeError(
            f"examples is a {type(examples).__name__}: expected {ACCEPTED}; pass a single example in a list"
        )
    if accuracy is None:
        raise ValueError(
            "examples need accuracy=..., which is measured on them; pass it, or leave examples out"
        )
    if isinstance(examples, Sequence) and not examples:
        raise ValueError("examples is empty: expected at least one; leave it out for built-in examples")


def make_examples(target: Any, roots: Sequence[Root], examples: Iterable[Any] | None) -> Examples:
    """Return the calls of the original models of `target`.

    Raises:
        TypeError: an example that the target does not accept.
        ValueError: no examples.
    """
    items = None if examples is None else list(islice(examples, _MOST))
    if items is not None and not items:
        raise ValueError("examples is empty: expected at least one; leave it out for built-in examples")
    is_encoder = roots[0].host == "sentence_transformers"
    if len(roots) > 1 and not is_encoder:
        return _of_pipeline(target, roots, items)
    if not is_encoder:
        calls, description = _of_model(target, roots[0].module, items)
        return Examples((calls,), description)
    # Only the transformers models of an encoder are measured. Its other modules stay in float32: they are small and close to the
    # output.
    calls, description = _of_model(target, target, items)
    each = tuple(calls if is_model(root.module) else [] for root in roots)
    return Examples(each, description, target, "float32")


def _of_model(target: Any, model: nn.Module, items: list[Any] | None) -> tuple[list[Call], str]:
    """Return the calls of `model`, the model of `target` or an encoder itself, and a description."""
    tools = Preprocessors(target, model)
    if items is not None:
        calls = [_call(item, f"examples[{place}]", tools) for place, item in enumerate(items)]
        return calls, count_text(len(calls), "example")
    if takes_ids(model) and tools.takes_texts:
        texts: list[Any] = built_in_texts()
        if type(model).__name__ == "CrossEncoder":
            texts = list(zip(texts, texts[1:] + texts[:1], strict=True))
        calls = [tools.of_text(text, f"built-in text {place}") for place, text in enumerate(texts)]
        if not isinstance(call_foreign(calls[0], model), Refusal):
            return calls, f"{len(texts)} built-in texts"
    calls = built_in_calls(model)
    inputs = (
        "random token ids (texts as examples=[...] are more meaningful)"
        if takes_ids(model)
        else "synthetic inputs"
    )
    return calls, f"{count_text(len(calls), 'call')} with {inputs}"


def count_text(number: int, noun: str) -> str:
    """Return a number with a noun, such as "3 examples"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def _call(item: Any, name: str, tools: Preprocessors) -> Call:
    if isinstance(item, str) or _is_pair(item):
        return tools.of_text(item, name)
    if isinstance(item, Mapping):
        return tools.of_inputs(item, name)
    if isinstance(item, Tensor):
        return Call((item,), {}, name)
    if isinstance(item, list | tuple) and item and all(isinstance(part, Tensor) for part in item):
        return Call(tuple(item), {}, name)
    if hasattr(item, "ndim") and hasattr(item, "dtype"):
        return tools.of_audio(item, name) if item.ndim == 1 else tools.of_image(item, name)
    if hasattr(item, "convert") and hasattr(item, "size"):  # an image of Pillow, which may not be installed
        return tools.of_image(item, name)
    raise TypeError(f"{name} is a {type(item).__name__}: expected {ACCEPTED}")


def _is_pair(item: Any) -> bool:
    """Return whether an example is a pair of texts for a cross-encoder."""
    return isinstance(item, list | tuple) and len(item) == 2 and all(isinstance(text, str) for text in item)


def _of_pipeline(target: Any, roots: Sequence[Root], items: list[Any] | None) -> Examples:
    """Call the target with the examples, and return the calls of its models.

    Raises:
        TypeError: the target is not callable.
        ValueError: the target does not accept an example.
    """
    if not callable(target):
        raise TypeError(
            f"accuracy is not supported for a {type(target).__name__} with several models that is not callable: accelerate its "
            "models one by one"
        )
    calls: tuple[list[Call], ...] = tuple([] for _ in roots)
    handles = [
        root.module.register_forward_pre_hook(partial(_record, recorded, root.name), with_kwargs=True)
        for root, recorded in zip(roots, calls, strict=True)
    ]
    few = _few_steps(target)
    try:
        for place, item in enumerate(built_in_texts()[:1] if items is None else items):
            arguments = item if isinstance(item, Mapping) else {}
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                try:
                    target(*(() if arguments else (item,)), **{**few, **arguments})
                except Exception as error:
                    name = "accuracy: the built-in text" if items is None else f"examples[{place}]"
                    raise ValueError(
                        f"{name}: {type(target).__name__} raised {type(error).__name__}: {error}; expected a dict of its arguments"
                    ) from error
    finally:
        for handle in handles:
            handle.remove()
    source = count_text(len(items), "example") if items is not None else "a built-in text"
    return Examples(calls, f"the calls of {source}")


def _few_steps(target: Any) -> dict[str, Any]:
    """Return the arguments that make a diffusion pipeline run few steps."""
    names = inspect.signature(type(target).__call__).parameters
    options = {"num_inference_steps": _STEPS, "output_type": "latent"}
    return {name: value for name, value in options.items() if name in names}


def _record(
    calls: list[Call], name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if len(calls) < _MOST_CALLS:
        calls.append(Call(args, dict(kwargs), f"call {len(calls)} of {name}"))
