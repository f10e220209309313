"""Apply the stages to a model, or leave it exactly as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from hf_cpu_accel.checkpoints.stored import is_stored
from hf_cpu_accel.checkpoints.stored_weight import plain_tensors
from hf_cpu_accel.hosts.root import Root
from hf_cpu_accel.patching.acceleration import ATTRIBUTE, Acceleration, AddedState
from hf_cpu_accel.patching.originals import OriginalsStore, make_store
from hf_cpu_accel.patching.own_rescaling import rescale_now
from hf_cpu_accel.patching.restore import Journal
from hf_cpu_accel.plan import Plan
from hf_cpu_accel.rewrite.core.calibrated import use_calibrated_weights
from hf_cpu_accel.rewrite.core.calibration import Example
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.packed_module import around_packed, loading_refused
from hf_cpu_accel.rewrite.core.packed_source import PackedSource, use_source
from hf_cpu_accel.rewrite.registry import STAGES
from hf_cpu_accel.runtime.memory import trim_heap


def apply_stages(
    root: Root,
    plan: Plan,
    *,
    saved: tuple[PackedSource, OriginalsStore] | None = None,
    calibration: Sequence[Example] = (),
) -> Acceleration:
    """Rewrite a model in place by `plan`. Any exception leaves it as it was.

    Args:
        root: the model. If it is trained, only stages that support gradients run, and weights stay as they are.
        plan: the settings.
        saved: the source of packed weights, and the store that reports where the originals are.
        calibration: the calls for which four-bit weights are rounded.

    Returns:
        The acceleration, with the rows of the plan.
    """
    assert plan.config is not None
    model, trains = root.module, root.trains
    source, store = (None, make_store(plan.config.originals, _lossy(model, plan))) if saved is None else saved
    journal = Journal()
    context = Context(model, plan, journal, store, name=root.name, calibration=calibration)
    added = AddedState(model)
    try:
        journal.record(added)  # first, so undone last: a restore that fails half-way can be tried again
        setattr(model, ATTRIBUTE, Acceleration(plan, journal, root.name, is_whole=False))
        if not trains:
            rescale_now(model, journal)
        with use_source(source), use_calibrated_weights():
            for stage in STAGES:
                if stage.trains or not trains:
                    context.results.items.extend(stage.apply(context) or ())
        if source is not None and source.left:
            raise ValueError(_unused_weights(source))
        plan = plan.with_items(tuple(context.results.items)).with_notes(tuple(context.results.notes))
        if not trains:
            added.hooks = [
                module.register_load_state_dict_pre_hook(_refuse_loading) for module in around_packed(model)
            ]
        acceleration = Acceleration(
            plan, journal, root.name, from_file=source is not None, calibration=context.calibration
        )
        setattr(model, ATTRIBUTE, acceleration)
        context.store.commit()
    except BaseException:
        journal.undo()
        raise
    trim_heap()
    return acceleration


def _lossy(model: nn.Module, plan: Plan) -> Iterator[Tensor]:
    """Yield the weights that packing rounds.

    In float32 packing is exact, except for weights of a quantized checkpoint and of convolutions: those for tiles, and those with
    a folded norm.
    """
    assert plan.config is not None
    dtypes = {plan.dtype, *dict(plan.config.dtypes).values(), *dict(plan.chosen_dtypes).values()}
    exact = dtypes == {"float32"}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            for weight in plain_tensors(parameter):
                if (
                    not exact
                    or weight.dim() == 4
                    or not weight.is_floating_point()
                    or is_stored(module, name)
                ):
                    yield weight


def _unused_weights(source: PackedSource) -> str:
    names = [name for weight in source.left for name in weight.parameters]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"the packed weights of {', '.join(names[:3])}{more} match no layer: hf_cpu_accel, torch, transformers "
        "or this machine differ from those that saved the file. Pack the original checkpoint again on this machine"
    )


def _refuse_loading(module: nn.Module, *args: Any) -> None:
    raise loading_refused()
