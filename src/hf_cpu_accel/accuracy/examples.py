"""From what the user gives as examples, or from nothing, to calls of each model of the target."""

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
    "a list of texts, images, sounds (arrays of one dimension), dicts of inputs, tensors or tuples of tensors, or an iterable of "
    "such, as a DataLoader is"
)
_MOST = 64  # of an iterable
_MOST_CALLS = 6  # of one model of a pipeline
_STEPS = 2  # of a diffusion pipeline


@dataclass(frozen=True)
class Examples:
    """
    Attributes:
        calls: for each model of the target, in their order; none for those that the target did not call.
        told: what they are, in words.
        whole: what is called, and whose outputs count; None where that is each model by itself.
        others: the dtype of those without calls.
    """

    calls: tuple[list[Call], ...]
    told: str
    whole: nn.Module | None = None
    others: str = "auto"


def check_examples(examples: object, accuracy: float | None) -> None:
    """
    Raises:
        TypeError: no list of examples.
        ValueError: an empty one, or there is no `accuracy` to be measured on them.
    """
    if examples is None:
        return
    if isinstance(examples, str | bytes | Mapping | Tensor) or not isinstance(examples, Iterable):
        raise TypeError(
            f"examples is a {type(examples).__name__}: expected {ACCEPTED}; a single one goes into a list"
        )
    if accuracy is None:
        raise ValueError("examples: they are what accuracy=... is measured on, and that was not given")
    if isinstance(examples, Sequence) and not examples:
        raise ValueError(
            "examples is empty: expected at least one; without the argument there are built-in ones"
        )


def make_examples(target: Any, roots: Sequence[Root], examples: Iterable[Any] | None) -> Examples:
    """The calls of the models of `target`, which are as they were made.

    Raises:
        TypeError: an example that nothing in `target` takes, naming it.
        ValueError: there are no examples.
    """
    items = None if examples is None else list(islice(examples, _MOST))
    if items is not None and not items:
        raise ValueError(
            "examples is empty: expected at least one; without the argument there are built-in ones"
        )
    if roots[0].host == "sentence_transformers":
        return _of_encoder(target, roots, items)
    if len(roots) > 1:
        return _of_pipeline(target, roots, items)
    model = roots[0].module
    tools = Preprocessors(target, model)
    if items is not None:
        calls = [_call(item, f"examples[{place}]", tools) for place, item in enumerate(items)]
        return Examples((calls,), counted(len(calls), "example"))
    if takes_ids(model) and tools.takes_texts:
        texts = built_in_texts()
        calls = [tools.of_text(text, f"built-in text {place}") for place, text in enumerate(texts)]
        if not isinstance(call_foreign(calls[0], model), Refusal):
            return Examples((calls,), f"{len(texts)} built-in texts")
    calls = built_in_calls(model)
    told = "random token ids (texts as examples=[...] say more)" if takes_ids(model) else "made-up inputs"
    return Examples((calls,), f"{counted(len(calls), 'call')} with {told}")


def _of_encoder(encoder: Any, roots: Sequence[Root], items: list[Any] | None) -> Examples:
    """Calls of an encoder of sentences as a whole, for the models of transformers in it.

    What else has weights stays in float32: it is small, and the last before the answer.
    """
    tools = Preprocessors(encoder, encoder)
    if items is None:
        texts = built_in_texts()
        pairs = type(encoder).__name__ == "CrossEncoder"
        given: list[Any] = list(zip(texts, texts[1:] + texts[:1], strict=True)) if pairs else list(texts)
        calls = [tools.of_text(text, f"built-in text {place}") for place, text in enumerate(given)]
    else:
        calls = [_call(item, f"examples[{place}]", tools) for place, item in enumerate(items)]
    told = f"{len(calls)} built-in texts" if items is None else counted(len(calls), "example")
    each: list[list[Call]] = [calls if is_model(root.module) else [] for root in roots]
    return Examples(tuple(each), told, encoder, "float32")


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


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
        return tools.of_sound(item, name) if item.ndim == 1 else tools.of_image(item, name)
    if hasattr(item, "convert") and hasattr(item, "size"):  # of Pillow, which need not be there
        return tools.of_image(item, name)
    raise TypeError(f"{name} is a {type(item).__name__}: expected {ACCEPTED}")


def _is_pair(item: Any) -> bool:
    """Of texts, as cross-encoders take them."""
    return isinstance(item, list | tuple) and len(item) == 2 and all(isinstance(text, str) for text in item)


def _of_pipeline(target: Any, roots: Sequence[Root], items: list[Any] | None) -> Examples:
    """The calls that the models get while the target is called with the examples.

    Raises:
        TypeError: the target is nothing to be called.
    """
    if not callable(target):
        raise TypeError(
            f"accuracy: a {type(target).__name__} of several models cannot be called: accelerate them one by one"
        )
    calls: tuple[list[Call], ...] = tuple([] for _ in roots)
    handles = [
        root.module.register_forward_pre_hook(partial(_record, kept, root.name), with_kwargs=True)
        for root, kept in zip(roots, calls, strict=True)
    ]
    few = _few_steps(target)
    try:
        for place, item in enumerate(built_in_texts()[:1] if items is None else items):
            given = item if isinstance(item, Mapping) else {}
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                try:
                    target(*(() if given else (item,)), **{**few, **given})
                except Exception as error:
                    name = "accuracy: the built-in text" if items is None else f"examples[{place}]"
                    raise ValueError(
                        f"{name}: {type(target).__name__} raised {type(error).__name__}: {error}; expected what it is called "
                        "with, as dicts of arguments"
                    ) from error
    finally:
        for handle in handles:
            handle.remove()
    what = counted(len(items), "example") if items is not None else "a built-in text"
    return Examples(calls, f"the calls of {what}")


def _few_steps(target: Any) -> dict[str, Any]:
    names = inspect.signature(type(target).__call__).parameters
    wanted = {"num_inference_steps": _STEPS, "output_type": "latent"}
    return {name: value for name, value in wanted.items() if name in names}


def _record(
    kept: list[Call], name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if len(kept) < _MOST_CALLS:
        kept.append(Call(args, dict(kwargs), f"call {len(kept)} of {name}"))
