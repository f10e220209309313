"""Applies the rules to a model, or leaves it exactly as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_cpu_accel.config import CPUAccelConfig
from hf_cpu_accel.lifecycle import follow_adapters
from hf_cpu_accel.patching.edits import watch_edits
from hf_cpu_accel.patching.hooks import forget_children
from hf_cpu_accel.patching.journal import Journal, freeze_parameters
from hf_cpu_accel.patching.modes import set_eval_mode
from hf_cpu_accel.patching.originals import make_store
from hf_cpu_accel.plan import Plan, PlanItem
from hf_cpu_accel.rewrite.convolution.convnext_block import fuse_convolution_blocks
from hf_cpu_accel.rewrite.convolution.residual_block import fuse_residual_blocks
from hf_cpu_accel.rewrite.core.autotune import autotune
from hf_cpu_accel.rewrite.core.casting import cast_all_or_nothing
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.first_call import check_first_calls
from hf_cpu_accel.rewrite.core.foreign import attempt
from hf_cpu_accel.rewrite.core.left_alone import has_weights, items_left, obstacle
from hf_cpu_accel.rewrite.core.packed_module import PackedModule, loading_refused
from hf_cpu_accel.rewrite.core.refusal import Refusal, refusal_items
from hf_cpu_accel.rewrite.core.rule import Rule
from hf_cpu_accel.rewrite.decoder.fuse import fuse_decoder_layers
from hf_cpu_accel.rewrite.encoder.layer import fuse_encoder_layers
from hf_cpu_accel.rewrite.encoder.padding import find_padding_readers
from hf_cpu_accel.rewrite.encoder.window_layer import fuse_window_layers
from hf_cpu_accel.rewrite.generation import accelerate_generation
from hf_cpu_accel.rewrite.graph.match import accelerate_message_passing
from hf_cpu_accel.rewrite.linear.nested_ffn import fuse_nested_ffns
from hf_cpu_accel.rewrite.registry import RULES
from hf_cpu_accel.runtime.memory import trim_heap

# A plain attribute of the model, so that its deep copies and pickles have it too.
_ATTRIBUTE = "_hf_cpu_accel"


@dataclass(frozen=True)
class Acceleration:
    """The state of an accelerated model.

    Attributes:
        name: what the target called it, if it had several.
        is_whole: False while it is being made, and if that was interrupted and could not be undone: `undo` then goes on.
    """

    plan: Plan
    journal: Journal
    name: str = ""
    is_whole: bool = True

    @property
    def config(self) -> CPUAccelConfig:
        assert self.plan.config is not None
        return self.plan.config


class _AddedState:
    """The attribute, and the hook that refuses to load a state dict, are there."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.hook: Any = None

    def undo(self) -> None:
        if self.hook is not None:
            self.hook.remove()
        vars(self.root).pop(_ATTRIBUTE, None)


def acceleration_of(root: nn.Module) -> Acceleration | None:
    """The state of `root`, or None if it is not accelerated itself (a part of it, or a model around it, may be)."""
    return vars(root).get(_ATTRIBUTE)


def accelerated_parts(root: nn.Module) -> list[nn.Module]:
    """The modules at and below `root` that were accelerated on their own."""
    return [module for module in root.modules() if acceleration_of(module) is not None]


def belongs_to_accelerated(root: nn.Module) -> bool:
    """Whether `root` has packed layers without having been accelerated itself, nor any part of it."""
    if accelerated_parts(root):
        return False
    return any(isinstance(module, PackedModule) for module in root.modules())


def apply(
    root: nn.Module, plan: Plan, rules: Sequence[Rule] = RULES, *, trains: bool = False, name: str = ""
) -> Acceleration:
    """Rewrite `root` in place as `plan` says; the returned plan has the items.

    With `trains` only what has gradients is put in place: weights stay as they are. `name` is what the target calls `root`, if it
    has several models.

    Any exception, from wherever, leaves `root` as it was.
    """
    assert plan.config is not None
    config = plan.config
    # In float32 only weights of convolutions do not come back bit for bit: those for tiles, and those with a norm folded in.
    exact = plan.dtype == "float32"
    lossy = sum(parameter.nbytes for parameter in root.parameters() if not exact or parameter.dim() == 4)
    journal = Journal()
    context = Context.of(root, config, plan.dtype, journal, make_store(config.originals, lossy), name=name)
    added = _AddedState(root)
    try:
        journal.record(added)  # first, so undone last: a restore that fails half-way can be tried again
        setattr(root, _ATTRIBUTE, Acceleration(plan, journal, name, is_whole=False))
        items = accelerate_message_passing(context)
        if not trains:
            freeze_parameters(journal, root)
            set_eval_mode(journal, root)
            modules = list(root.named_modules())
            items.extend(_rewrite(context, rules))
            items.extend(fuse_convolution_blocks(context))
            items.extend(fuse_residual_blocks(context))
            items.extend(fuse_nested_ffns(context))
            items.extend(fuse_encoder_layers(context))
            items.extend(fuse_window_layers(context))
            items.extend(fuse_decoder_layers(context))
            items.extend(refusal_items(context.refused, items))
            items.extend(items_left(modules, items, context))
            items.extend(accelerate_generation(context))
            follow_adapters(context)
            cast_all_or_nothing(context)
            plan = plan.with_notes(find_padding_readers(root))
            watch_edits(root, journal)
            if config.verify == "first":
                check_first_calls(root, journal)
            if context.measured:
                autotune(root, journal)
        acceleration = Acceleration(plan.with_items(tuple(items)), journal, name)
        if not trains:
            added.hook = root.register_load_state_dict_pre_hook(_refuse_loading)
        setattr(root, _ATTRIBUTE, acceleration)
        context.store.commit()
    except BaseException:
        journal.undo()
        raise
    trim_heap()
    return acceleration


def undo(root: nn.Module) -> None:
    """Give `root` its original modules, weights and configs back.

    Raises:
        RuntimeError: the original weights were dropped (`originals="drop"`); the model stays accelerated.
    """
    acceleration = acceleration_of(root)
    if acceleration is not None:
        acceleration.journal.check()
        acceleration.journal.undo()
        forget_children(root)  # hooks on modules of ours went to the originals


def _rewrite(context: Context, rules: Sequence[Rule]) -> list[PlanItem]:
    items: list[PlanItem] = []
    for path, module in list(context.root.named_modules()):
        considered = False
        for rule in rules:
            if id(module) in context.handled:
                break
            match = attempt(path, rule.match, module, path, context)
            if match is None or isinstance(match, Refusal):
                continue
            considered = True
            outcome = rule.apply(match, context)
            items.extend(outcome.items)
            context.handled.update(id(handled) for handled in outcome.handled)
        if not considered and id(module) not in context.handled and has_weights(module):
            items.append(PlanItem.left(path, type(module).__name__, obstacle(path, module, context)))
    return items


def _refuse_loading(module: nn.Module, *args: Any) -> None:
    raise loading_refused()
