"""The main functions: `accelerate_for_cpu`, `restore`, `accelerated`, `explain`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from hf_cpu_accel import plan as plans
from hf_cpu_accel.accuracy.examples import check_examples
from hf_cpu_accel.accuracy.gain import with_gain
from hf_cpu_accel.config import CPUAccelConfig, resolve
from hf_cpu_accel.hosts.find import Root, find
from hf_cpu_accel.lifecycle import accelerate_roots, lock, restore_roots
from hf_cpu_accel.lora import follow_pipeline, leave_pipeline
from hf_cpu_accel.measure.dtype_choice import Choice
from hf_cpu_accel.patching.acceleration import accelerated_parts, acceleration_of, has_settings
from hf_cpu_accel.plan import Plan
from hf_cpu_accel.rewrite.core.autotune import with_unfused
from hf_cpu_accel.rewrite.core.calibration import Example, requested_examples
from hf_cpu_accel.rewrite.core.checks import check_models, check_patterns, check_whole
from hf_cpu_accel.rewrite.core.first_call import with_first_calls
from hf_cpu_accel.rewrite.generation import with_drafts
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
    """Accelerate inference with `target` in place.

    Layers are replaced by packed and fused ones. Inputs, outputs, dtypes of outputs and `state_dict` keys stay the same. Until
    `restore`, parameters require no gradients. Only graph neural networks can be trained while they are accelerated.

    A second call with the same settings does nothing. A call with other settings restores the target and accelerates it again.

    Args:
        target: a transformers `Pipeline` or `PreTrainedModel`, a diffusers `DiffusionPipeline` or `ModelMixin`, a
            `SentenceTransformer`, or any `nn.Module`, on the CPU and in eval mode.
        config: all settings. Other arguments override its fields if they differ from their defaults.
        dtype: see `CPUAccelConfig`.
        compile: see `CPUAccelConfig`.
        examples: the inputs to measure `accuracy` on, a list or an iterable such as a `DataLoader`. The first 64 are used. Each is
            a dict of inputs, a tensor or a tuple of tensors. Pipelines, and models that were loaded with their tokenizer or
            processor, also accept texts, images or audio. None for built-in examples: texts if there is a tokenizer, or else
            random token ids, smooth images or tones. Passing examples chooses the dtypes again.
        calibration: the inputs to calibrate on, for `dtype="int4"` (rounding of weights) and `dtype="int8-static"` (ranges of
            images): a list of texts, a list of dicts of inputs, or a data loader of dicts or tensors. The target must be one
            model, or a pipeline with one model.
        tokenizer: a tokenizer for texts, if the target has none.
        options: further fields of `CPUAccelConfig`.

    Returns:
        `target`, which is changed in place.

    Raises:
        TypeError: a target that is not supported, an unknown option, or a value of the wrong type.
        ValueError: a value that is not accepted, or a model that cannot be accelerated; the message contains the remedy. After
            an exception the target is unchanged, except that a target with other settings may have been restored.
    """
    settings = resolve(config, dtype=dtype, compile=compile, **options)
    check_examples(examples, settings.accuracy)
    roots = find(target)
    calls = requested_examples(calibration, target, roots, settings, tokenizer)
    _accelerate(target, roots, settings, calls, examples)
    return target


def restore(target: T) -> T:
    """Undo `accelerate_for_cpu`: restore the original modules, weights and configs, so that outputs are bit-identical.

    Args:
        target: an accelerated target; one that is not accelerated stays unchanged.

    Returns:
        `target`, which is changed in place.

    Raises:
        RuntimeError: the original weights were dropped (`originals="drop"`); the target stays accelerated.
        ValueError: `target` is a part of an accelerated model; restore the whole model.
    """
    with lock:
        roots = find(target)
        for root in roots:
            check_whole(root.module)
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
    """Accelerate `target` inside a context, and bring back its earlier state at the end.

        with accelerated(model, dtype="int8") as fast:
            fast(**inputs)

    Args:
        target: see `accelerate_for_cpu`.
        config: see `accelerate_for_cpu`.
        dtype: see `CPUAccelConfig`.
        compile: see `CPUAccelConfig`.
        examples: see `accelerate_for_cpu`.
        options: further arguments of `accelerate_for_cpu`.

    Yields:
        `target`, accelerated.

    Raises:
        TypeError, ValueError: see `accelerate_for_cpu`.
    """
    before = [acceleration_of(root.module) for root in find(target)]
    earlier = before[0] if before else None
    accelerate_for_cpu(target, config, dtype=dtype, compile=compile, examples=examples, **options)
    try:
        yield target
    finally:
        if earlier is None:
            restore(target)
        else:
            # Dtypes that were chosen for an accuracy are used again without a search.
            choices = [None if state is None else next(iter(state.plan.choices), None) for state in before]
            _accelerate(target, find(target), earlier.config, earlier.calibration, choices=choices)


def explain(target: object) -> Plan:
    """Return the plan of an accelerated target: the modules that were replaced, and the reasons of those that were left.

    Args:
        target: an accelerated target; the plan of another target is empty.

    Returns:
        The plan. Print it for a table, or call `to_dict()`; in a notebook it shows as a tree.

    Raises:
        ValueError: `target` is a part of an accelerated model; explain the whole model.
    """
    plan_list, roots = [], find(target)
    for root in roots:
        check_whole(root.module)
        for part in accelerated_parts(root.module):
            acceleration = acceleration_of(part)
            assert acceleration is not None
            plan = with_unfused(with_providers(acceleration.plan, with_lowered(part)), part)
            plan = with_drafts(with_engines(with_first_calls(plan, part), part), part)
            plan_list.append(plans.under(root.name, plan))
    if not plan_list:
        return plans.nothing(threads=torch.get_num_threads())
    return with_gain(plans.join(plan_list), roots[0].module)


def _accelerate(
    target: object,
    roots: Sequence[Root],
    settings: CPUAccelConfig,
    calibration: tuple[Example, ...],
    examples: Iterable[Any] | None = None,
    choices: Sequence[Choice | None] | None = None,
) -> None:
    """Accelerate the models of a target.

    Args:
        target: the target.
        roots: its models.
        settings: the settings.
        calibration: calls to calibrate on.
        examples: see `accelerate_for_cpu`.
        choices: earlier choices of dtypes for `settings.accuracy`, one per model.
    """
    # Tensors of inference mode have no version counters, and packed weights could not be used outside of it.
    with lock, torch.inference_mode(False):
        changed = [
            root
            for root in roots
            if examples is not None or not has_settings(root.module, settings, calibration)
        ]
        if changed:
            check_models(changed)
            check_patterns(roots, settings)
            if settings.accuracy is None:
                choices = None
            else:
                changed = list(roots)  # the inputs of a model come from the other models
                if choices is None or not any(choices):
                    from hf_cpu_accel.accuracy.choose import choose

                    choices = choose(target, changed, settings, examples, calibration)
            accelerate_roots(changed, settings, choices=choices, calibration=calibration)
        elif settings.threads is not None:
            apply_threads(settings.threads)
        follow_pipeline(target)
