"""The models whose plans the golden files hold, by name, and how each is built and called.

A name is a model type of transformers, `pyg.LAYER`, `diffusers.MODEL`, or `SUITE.MODEL` of benchmarks.suites.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.plan import Plan
from tests.plans.rows import Rows, rows_of

DTYPES = ("float32", "int8")
GROUPS = ("transformers", "pyg", "diffusers", "suites")
SUITES = ("huggingface", "timm", "torchbench")


Inspection = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A model with a call that runs its layers.

    Attributes:
        title: the class, and how it was built and called.
        target: what `accelerate_for_cpu` is given.
        call: runs all layers that can be run; some layers are recorded in it.
    """

    title: str
    target: Any
    call: Callable[[], object]


class NotRunError(Exception):
    """The model can not be built or called; the message contains no numbers that change."""


def group_of(name: str) -> str:
    """Return the golden file that a model belongs to."""
    prefix = name.partition(".")[0]
    if prefix in SUITES:
        return "suites"
    return prefix if prefix in ("pyg", "diffusers") else "transformers"


def names(group: str) -> list[str]:
    """Return the names of all models of a golden file."""
    if group == "transformers":
        from transformers import CONFIG_MAPPING

        return sorted(CONFIG_MAPPING)
    if group == "pyg":
        return sorted(_graph_layers())
    if group == "diffusers":
        from tests.hosts.diffusion_pipelines import PIPELINES
        from tests.plans.diffusion import MODELS

        return sorted(f"diffusers.{name}" for name in (*PIPELINES, *MODELS))
    from benchmarks.suites import cases

    return sorted(f"{suite}.{name}" for suite in SUITES for name in cases.SUITES[suite])


def inspect(name: str, dtypes: Sequence[str] = DTYPES) -> Inspection:
    """Return {"title", "rows": {dtype: the rows of the plan after a call}, "errors": {dtype: class of an error}} of a model."""
    torch.manual_seed(0)
    try:
        subject = _BUILDERS[group_of(name)](name)
    except NotRunError as error:
        return {"title": f"not run, {error}", "rows": {}, "errors": {}}
    rows: dict[str, Rows] = {}
    errors: dict[str, str] = {}
    for dtype in dtypes:
        try:
            rows[dtype] = rows_of(_plan(subject, dtype))
        except Exception as error:
            errors[dtype] = type(error).__name__
    return {"title": subject.title, "rows": rows, "errors": errors}


def _plan(subject: Subject, dtype: str) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            accelerate_for_cpu(subject.target, dtype=dtype)
            subject.call()
            return explain(subject.target)
        finally:
            restore(subject.target)


def _transformer(name: str) -> Subject:
    from tests.architectures.check import run_all
    from tests.architectures.find import calls_of, find_model, run
    from tests.architectures.layers import linears_of_layers
    from tests.architectures.small import exceptions
    from tests.architectures.towers import towers_of

    why = exceptions().get(name, {}).get("why")
    if why is not None:
        raise NotRunError(why)
    model, batch, recipe = _found(find_model(name))
    calls = calls_of(model, batch)
    towers = towers_of(model, list(linears_of_layers(model)), lambda: run(model, batch))
    title = ", ".join((_title(model, recipe, batch), *(side for side in calls if side != "plain"), *towers))
    return Subject(title, model, lambda: run_all(model, calls, towers))


def _title(model: nn.Module, recipe: str, batch: dict[str, Any]) -> str:
    return f"{type(model).__name__} ({recipe}) with {', '.join(batch)}"


def _found(result: Any) -> Any:
    """Return a result of `search`.

    Raises:
        NotRunError: nothing was found.
    """
    if isinstance(result, list):
        reasons = [reason for reason in result if "is not called" in reason] or result
        kinds = re.search(r"is not (?:built|called)|no model class|nothing was found|no numbers", reasons[0])
        error = re.search(r": (\w+):", reasons[0])
        raise NotRunError(": ".join(match[match.lastindex or 0] for match in (kinds, error) if match))
    return result


@functools.cache
def _graph_layers() -> dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]]:
    """Return {name: (build, arguments besides nodes and edges)}."""
    from tests.hosts import pyg_classes, pyg_layers

    layers: dict[str, Any] = {}
    for name, make in pyg_classes.CLASSES.items():
        layers[name] = (make, functools.partial(_class_arguments, name))
    for name, (make, more) in pyg_layers.LAYERS.items():
        layers[name] = (make, functools.partial(_layer_arguments, more))
    return {f"pyg.{re.sub(r'[^A-Za-z0-9]+', '-', name)}": layer for name, layer in layers.items()}


def _class_arguments(name: str) -> dict[str, Any]:
    from tests.hosts.pyg_classes import EDGES, FEATURES, SOURCES, arguments_of

    generator = torch.Generator().manual_seed(0)
    nodes = torch.randn(SOURCES, FEATURES, generator=generator)
    edges = torch.randint(0, SOURCES, (2, EDGES), generator=generator)
    return {"x": nodes, "edge_index": edges, **arguments_of(name, generator)}


def _layer_arguments(more: dict[str, Tensor]) -> dict[str, Any]:
    from tests.hosts.pyg_layers import EDGES, FEATURES, NODES

    generator = torch.Generator().manual_seed(0)
    nodes = torch.randn(NODES, FEATURES, generator=generator)
    return {"x": nodes, "edge_index": torch.randint(0, NODES, (2, EDGES), generator=generator), **more}


def _graph_layer(name: str) -> Subject:
    build, make_arguments = _graph_layers()[name]
    layer = build().eval()
    arguments = make_arguments()
    return Subject(type(layer).__name__, layer, lambda: _call(layer, arguments))


def _diffusion(name: str) -> Subject:
    from tests.hosts.diffusion_pipelines import PIPELINES
    from tests.plans.diffusion import MODELS, build

    kind = name.partition(".")[2]
    if kind in PIPELINES:
        pipe, call = PIPELINES[kind]()
        return Subject(type(pipe).__name__, pipe, call)
    model, arguments = build(kind), MODELS[kind][2]
    return Subject(type(model).__name__, model, lambda: _call(model, arguments))


def _call(model: nn.Module, arguments: dict[str, Any]) -> object:
    with torch.no_grad():
        return model(**arguments)


def _suite(name: str) -> Subject:
    """Models of transformers are built small, with the options that the suite gives them; other networks as they are."""
    from transformers import PreTrainedModel

    from benchmarks.suites.cases import case
    from tests.architectures.find import run, search
    from tests.architectures.small import smaller

    found = case(f"{name}:1")
    assert found is not None, name
    with torch.device("meta"):
        outline = found.model.build()
    if not isinstance(outline, PreTrainedModel):
        model = found.build()
        inputs = found.inputs(model)
        return Subject(type(model).__name__, model, lambda: found.forward(model, inputs))
    small, batch, recipe = _found(search(smaller(outline.config), lambda _: [type(outline)]))
    return Subject(_title(small, recipe, batch), small, lambda: run(small, batch))


_BUILDERS: dict[str, Callable[[str], Subject]] = {
    "transformers": _transformer,
    "pyg": _graph_layer,
    "diffusers": _diffusion,
    "suites": _suite,
}
