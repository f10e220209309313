"""The front door: `accelerate_for_cpu`, `restore`, `accelerated`, `explain`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from hf_cpu_accel import plan as plans
from hf_cpu_accel.accuracy.examples import check_examples
from hf_cpu_accel.accuracy.gain import with_gain
from hf_cpu_accel.config import CPUAccelConfig, resolve
from hf_cpu_accel.hosts.find import Root, find
from hf_cpu_accel.lifecycle import accelerate_roots, lock, restore_roots
from hf_cpu_accel.lora import follow_pipeline, leave_pipeline
from hf_cpu_accel.measure.dtype_choice import Choice
from hf_cpu_accel.patching.acceleration import Acceleration, accelerated_parts, acceleration_of
from hf_cpu_accel.plan import Plan
from hf_cpu_accel.rewrite.apply import belongs_to_accelerated
from hf_cpu_accel.rewrite.core.autotune import with_unfused
from hf_cpu_accel.rewrite.core.calibration import NO_EXAMPLES, Example, calibration_examples
from hf_cpu_accel.rewrite.core.checks import check_model, check_patterns
from hf_cpu_accel.rewrite.core.first_call import with_first_calls
from hf_cpu_accel.rewrite.linear.provider_report import with_providers
from hf_cpu_accel.rewrite.quantized.engines import with_engines
from hf_cpu_accel.rewrite.quantized.graph import with_lowered
from hf_cpu_accel.runtime.memory import release_buffers
from hf_cpu_accel.runtime.threads import apply_threads

T = TypeVar("T")


def accelerate_for_cpu(
    target: T,
    config: CPUAccelConfig | None = None,
    *,
    dtype: str = "auto",
    compile: str = "auto",
    examples: Iterable[Any] | None = None,
    calibration: Iterable[Any] | None = None,
    tokenizer: Any = None,
    **options: Any,
) -> T:
    """Make inference with `target` faster, in place.

    Layers are replaced by packed and fused ones; inputs, outputs, dtypes of outputs and `state_dict` keys stay what they
    are. The model is for inference until `restore`: its parameters stop asking for gradients.

    Args:
        target: a transformers `Pipeline` or `PreTrainedModel`, a diffusers `DiffusionPipeline` or `ModelMixin`, a
            `SentenceTransformer`, or any `nn.Module`, on the CPU and in eval mode.
        config: all settings at once. Keywords other than their defaults override it.
        dtype, compile, options: the fields of `CPUAccelConfig`.
        examples: what `accuracy` is measured on: texts, images or sounds, where the target is a pipeline or was loaded beside what
            makes inputs of them; dicts of inputs, tensors, or tuples of tensors; a list, or an iterable such as a DataLoader,
            of which 64 are taken. None for built-in ones: texts where there is a tokenizer, else random token ids, smooth images
            or tones. Where examples are given, dtypes are chosen anew.
        calibration: for `dtype="int4"`, examples that weights are rounded for, and for `"int8-static"`, examples that show the
            ranges of images: a list of texts, a list of dictionaries of
            inputs, or a data loader of such or of tensors. Target is one model then, or a pipeline with one.
        tokenizer: for texts, where the target has none.

    Returns:
        `target` itself. With the settings it was accelerated with already, nothing happens; with others it is restored
        and accelerated anew.

    Raises:
        TypeError: a target that is not supported, an unknown option, or a value of the wrong type.
        ValueError: a value that is not accepted, or a model that cannot be accelerated as it is; the message says what
            to do. After any exception the target is as it was, except that one accelerated with other settings may
            have been restored.
    """
    settings = resolve(config, dtype=dtype, compile=compile, **options)
    check_examples(examples, settings.accuracy)
    roots = find(target)
    calls = _calibration(target, roots, settings, calibration, tokenizer)
    _accelerate(target, roots, settings, calls, examples)
    return target


def restore(target: T) -> T:
    """Undo `accelerate_for_cpu`: original modules, weights and configs, outputs bit for bit as before.

    A target that is not accelerated is returned as it is.

    Raises:
        RuntimeError: the original weights are gone (`originals="drop"`); the target stays accelerated.
        ValueError: `target` is a part of an accelerated model, which has to be restored as a whole.
    """
    with lock:
        roots = find(target)
        for root in roots:
            _check_whole(root.module)
        restore_roots(roots)
        leave_pipeline(target)
    release_buffers()
    return target


@contextmanager
def accelerated(
    target: T,
    config: CPUAccelConfig | None = None,
    *,
    dtype: str = "auto",
    compile: str = "auto",
    examples: Iterable[Any] | None = None,
    **options: Any,
) -> Iterator[T]:
    """`with accelerated(model) as model:` accelerates on entry, and on exit brings back the state before."""
    before = [acceleration_of(root.module) for root in find(target)]
    earlier = before[0] if before else None
    accelerate_for_cpu(target, config, dtype=dtype, compile=compile, examples=examples, **options)
    try:
        yield target
    finally:
        if earlier is None:
            restore(target)
        else:
            # Dtypes that were chosen for an accuracy are not searched anew.
            choices = [None if state is None else next(iter(state.plan.choices), None) for state in before]
            _accelerate(target, find(target), earlier.config, earlier.calibration, choices=choices)


def explain(target: object) -> Plan:
    """What was replaced by what, and what was left and why; print it, or take `.to_dict()`.

    Raises:
        ValueError: `target` is a part of an accelerated model: explain that model.
    """
    found, roots = [], find(target)
    for root in roots:
        _check_whole(root.module)
        for part in accelerated_parts(root.module):
            acceleration = acceleration_of(part)
            assert acceleration is not None
            plan = with_unfused(with_providers(acceleration.plan, with_lowered(part)), part)
            plan = with_engines(with_first_calls(plan, part), part)
            if acceleration.config.compile in ("now", "background"):
                from hf_cpu_accel.compiler.background.attach import with_compiled

                plan = with_compiled(plan, acceleration)
            found.append(plans.under(root.name, plan))
    if not found:
        return plans.nothing(threads=torch.get_num_threads())
    return with_gain(plans.join(found), roots[0].module)


def _accelerate(
    target: object,
    roots: Sequence[Root],
    settings: CPUAccelConfig,
    calibration: tuple[Example, ...],
    examples: Iterable[Any] | None = None,
    choices: Sequence[Choice | None] | None = None,
) -> None:
    """`choices`: those that were made before for `settings.accuracy`, for each root."""
    # Where nothing counts versions, and packed weights could be used nowhere else, layers would not be recognized.
    with lock, torch.inference_mode(False):
        others = [
            root
            for root in roots
            if examples is not None or not _has_settings(root.module, settings, calibration)
        ]
        if others:
            for root in others:
                _check(root)
            models = [(root.name, root.module) for root in roots]
            check_patterns(models, settings.skip_modules, argument="skip_modules")
            check_patterns(models, dict(settings.dtypes), argument="dtypes")
            if settings.accuracy is not None:
                others = list(roots)  # what one is called with comes from the others
                if choices is None or not any(choices):
                    from hf_cpu_accel.accuracy.choose import choose

                    choices = choose(target, others, settings, examples, calibration)
                accelerate_roots(others, settings, choices=choices, calibration=calibration)
            else:
                accelerate_roots(others, settings, calibration=calibration)
        elif settings.threads is not None:
            apply_threads(settings.threads)
        follow_pipeline(target)


def _has_settings(module: nn.Module, settings: CPUAccelConfig, calibration: tuple[Example, ...]) -> bool:
    acceleration = acceleration_of(module)
    if acceleration is None or not acceleration.is_whole:
        return False
    if calibration and calibration != acceleration.calibration:
        return False
    return acceleration.config == settings or (
        acceleration.from_file and _is_as_packed(acceleration, settings)
    )


def _is_as_packed(acceleration: Acceleration, settings: CPUAccelConfig) -> bool:
    """Whether `settings` ask for nothing that the file of a packed model does not say: it has no originals to be kept or dropped,
    and threads are no matter of the file."""
    dtype = "auto" if settings.dtype == acceleration.plan.dtype else settings.dtype
    return replace(settings, dtype=dtype, threads=None, originals="disk") == CPUAccelConfig()


def _calibration(
    target: object,
    roots: Sequence[Root],
    settings: CPUAccelConfig,
    calibration: Iterable[Any] | None,
    tokenizer: Any,
) -> tuple[Example, ...]:
    """The calls that weights are to be rounded for.

    Raises:
        TypeError, ValueError: see `rewrite.core.calibration`; or there is nothing to be rounded for them.
    """
    static = settings.dtype == "int8-static"
    if calibration is None:
        if static:
            raise ValueError(NO_EXAMPLES)
        return ()
    rounded = static or "int4" in (settings.dtype, *dict(settings.dtypes).values())
    if settings.accuracy is None and not rounded:
        raise ValueError(
            f"calibration rounds four-bit weights or shows ranges, and dtype={settings.dtype!r}: ask for 'int4' or 'int8-static'"
        )
    if len(roots) != 1:
        raise ValueError(
            f"calibration is for one model, and a {type(target).__name__} has {len(roots)}: accelerate them one by one"
        )
    return calibration_examples(calibration, roots[0].module, tokenizer or getattr(target, "tokenizer", None))


def _check(root: Root) -> None:
    _check_whole(root.module)
    check_model(root.module, root.deciding, adds_in_training=root.adds_in_training)


def _check_whole(module: nn.Module) -> None:
    if belongs_to_accelerated(module):
        raise ValueError(
            f"target: this {type(module).__name__} is a part of an accelerated model: "
            "explain or restore that model as a whole"
        )
