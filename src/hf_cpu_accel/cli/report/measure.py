"""The measurements of a report: the model as in `bench`, each layer, and the limits of the machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel import extension
from hf_cpu_accel.accuracy.built_in import built_in_calls, takes_ids
from hf_cpu_accel.api import accelerate_for_cpu, explain
from hf_cpu_accel.check import float_tensors
from hf_cpu_accel.cli import random_models
from hf_cpu_accel.cli.bench import measure as bench_measure
from hf_cpu_accel.cli.bench import workload as bench_workload
from hf_cpu_accel.cli.loading import Load, blocks_of, load_eager, model_to_accelerate
from hf_cpu_accel.cli.report import layers as by_layer
from hf_cpu_accel.cli.report.layers import Layer
from hf_cpu_accel.frontends.gguf import split_path
from hf_cpu_accel.plan import Plan
from hf_cpu_accel.runtime import hardware
from hf_cpu_accel.runtime.hardware import Peaks

_GGUF_CLASS = "AutoModelForCausalLM"


@dataclass(frozen=True)
class Subject:
    """A model and the shape of its calls, for `bench_measure.measure`.

    Attributes:
        title: name of the model.
        batch: sequences, images or audio clips per call.
        seq: tokens per sequence.
        build: builds the model.
        blocks: loads a GGUF file with its weights in blocks; None for other models.
    """

    title: str
    batch: int
    seq: int
    build: Callable[[], nn.Module]
    blocks: Load | None = None

    def to_accelerate(self, eager: nn.Module) -> nn.Module:
        """Return the model to accelerate and compare with `eager`, the result of `build`."""
        accelerated: nn.Module = model_to_accelerate(eager, self.blocks)
        return accelerated

    def inputs(self, model: nn.Module) -> dict[str, Tensor]:
        """Return random token ids as in `bench`; for models without token ids, the built-in example repeated `batch` times."""
        if takes_ids(model):
            text = bench_workload.Workload(self.title, "", self.batch, self.seq, self.build)
            return text.inputs(model)
        call = built_in_calls(model)[0]
        return {
            name: value.repeat(self.batch, *[1] * (value.dim() - 1)) if isinstance(value, Tensor) else value
            for name, value in call.kwargs.items()
        }

    def forward(self, model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
        """Return the float outputs of the model, without caches."""
        with torch.inference_mode():
            return float_tensors(plain_outputs(model(**inputs)))


def plain_outputs(output: Any) -> Any:
    """Return the tensors of `output`, without caches and lists of hidden states."""
    if isinstance(output, dict):
        return [value for value in output.values() if isinstance(value, Tensor)]
    return output


@dataclass(frozen=True)
class Report:
    """The results on the page.

    Attributes:
        subject: the model and the shape of its calls.
        inputs: names and shapes of the inputs, as text.
        parameters: number of parameters.
        results: results of the whole model; eager float32 first, then each dtype.
        dtype: the fastest dtype, which the plan and the layers are about.
        plan: `explain()` of the accelerated model.
        layers: results of the layers.
        peaks: measured peaks of this machine; None without the native kernels.
        refused: why there are no peaks; empty otherwise.
    """

    subject: Subject
    inputs: str
    parameters: int
    results: Sequence[bench_measure.Result]
    dtype: str
    plan: Plan
    layers: list[Layer]
    peaks: Peaks | None
    refused: str = ""


def subject(model: str | None, random_config: str | None, batch: int, seq: int) -> Subject:
    """Check the arguments and return the subject. Nothing is loaded.

    Raises:
        ValueError: both or none of `model` and `random_config`, or an unknown name.
    """
    title = bench_workload.source_title(model, random_config)
    if random_config is not None:
        return Subject(title, batch, seq, lambda: random_models.build(random_config))
    assert model is not None
    return Subject(title, batch, seq, lambda: _load(model), blocks_of(model, _GGUF_CLASS))


def measure(
    subject: Subject,
    dtypes: Sequence[str],
    *,
    repeats: int,
    threads: int,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Report:
    """Measure the model, its layers and the machine.

    Args:
        subject: the model and the shape of its calls.
        dtypes: dtypes for `accelerate_for_cpu`.
        repeats: number of rounds for the whole model.
        threads: number of threads.
        on_stage: called with a description of each stage.

    Raises:
        OSError, ValueError: from loading and from `accelerate_for_cpu`.
    """
    results = bench_measure.measure(subject, dtypes, repeats=repeats, on_stage=on_stage)  # type: ignore[arg-type]
    fastest = min(results[1:], key=lambda result: result.seconds.value)
    eager = subject.build()
    inputs = subject.inputs(eager)
    accelerated = accelerate_for_cpu(subject.to_accelerate(eager), dtype=fastest.system)
    for _ in range(2):
        subject.forward(accelerated, inputs)
    on_stage("measuring the machine")
    peaks, refused = _peaks(threads)
    plan = explain(accelerated)
    layers = by_layer.measure(
        eager,
        accelerated,
        plan,
        lambda model: subject.forward(model, inputs),
        rounds=max(3, repeats // 2),
        on_layer=lambda path: on_stage(f"measuring {path}"),
    )
    parameters = sum(parameter.numel() for parameter in eager.parameters())
    shapes = ", ".join(
        f"{name} {list(value.shape)}" for name, value in inputs.items() if isinstance(value, Tensor)
    )
    return Report(subject, shapes, parameters, results, fastest.system, plan, layers, peaks, refused)


def _peaks(threads: int) -> tuple[Peaks | None, str]:
    status = extension.status()
    if not status.loaded:
        return None, f"the native kernels, which measure the peaks, are not loaded: {status.error}"
    return hardware.measure_peaks(threads), ""


def _load(model: str) -> nn.Module:
    from hf_cpu_accel.cli.pack import load

    if split_path(model) is not None:
        unpacked: nn.Module = load_eager(model, _GGUF_CLASS, torch.float32)
        return unpacked
    loaded: nn.Module = load(model)
    return loaded.float().eval()
