"""Models inside of a model that its own call leaves out, as those of images and sounds: they are called by themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.architectures.find import SEARCH, Outputs, run
from tests.architectures.inputs import Maker

_Call = tuple[dict[str, Any], Tensor | None, Outputs]


def towers_of(model: nn.Module, layers: list[str], call: Callable[[], Any]) -> dict[str, _Call]:
    """{path of a model inside: (batch, None, what eager gives)} for the layers at these paths that `call` does not reach, as far as
    calls are found that do."""
    left = set(layers) - _reached(model, layers, call)
    until = time.process_time() + SEARCH
    towers: dict[str, _Call] = {}
    for path in layers:
        for above in _models_above(model, path) if path in left else ():
            found = _call_of(model, above, path, until)
            if found is not None:
                towers[above], reached = found
                left -= reached
                break
    return towers


def _models_above(model: nn.Module, path: str) -> Iterator[str]:
    """The paths of the models that a layer is in, but for `model`, the innermost first."""
    above = path.rpartition(".")[0]
    while above:
        if isinstance(model.get_submodule(above), PreTrainedModel):
            yield above
        above = above.rpartition(".")[0]


def _call_of(model: nn.Module, above: str, path: str, until: float) -> tuple[_Call, set[str]] | None:
    """The first call of the model at `above` that reaches the layer at `path`, and which layers it reaches."""
    tower = model.get_submodule(above)
    layers = [f"{above}.{name}" for name, _ in tower.named_modules() if name]
    for batch in Maker(tower).batches():
        if time.process_time() > until:
            return None
        outputs: Outputs = {}

        def call(batch: dict[str, Any] = batch, into: Outputs = outputs) -> None:
            into.update(run(tower, batch))

        try:
            reached = _reached(model, layers, call)
        except Exception:
            continue
        if path in reached and outputs and all(tensor.isfinite().all() for tensor in outputs.values()):
            return (batch, None, outputs), reached
    return None


def _reached(model: nn.Module, paths: list[str], call: Callable[[], Any]) -> set[str]:
    reached: set[str] = set()
    hooks = [
        model.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: reached.add(path))
        for path in paths
    ]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    return reached
