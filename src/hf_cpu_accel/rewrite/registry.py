"""The table of stages that rewrite a model, in order, and of the rules that match its modules one by one.

A stage matches a structure and replaces modules through `context.journal`, which can undo that. It returns rows of the plan.
One test covers all stages: a failure after any stage leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hf_cpu_accel.checkpoints.gguf import unpacked_tensors
from hf_cpu_accel.patching.fused_module import watch_inner_modules
from hf_cpu_accel.patching.modes import keep_eval_mode, set_eval_mode
from hf_cpu_accel.patching.replacement import replace_classes
from hf_cpu_accel.patching.restore import freeze_parameters
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.attention.deformable import fuse_deformable_attention
from hf_cpu_accel.rewrite.attention.match import AttentionRule
from hf_cpu_accel.rewrite.attention.multihead_match import MultiheadAttentionRule
from hf_cpu_accel.rewrite.attention.processor import ProcessorAttentionRule
from hf_cpu_accel.rewrite.attention.sliding_window import fuse_sliding_windows
from hf_cpu_accel.rewrite.cached.match import fuse_cached_attention, fuse_cached_layers
from hf_cpu_accel.rewrite.calibration.stage import calibrate
from hf_cpu_accel.rewrite.convolution.as_linear import ConvolutionLinearRule
from hf_cpu_accel.rewrite.convolution.batch_norm import BatchNormRule
from hf_cpu_accel.rewrite.convolution.computed_weight import settle, with_computed_weight
from hf_cpu_accel.rewrite.convolution.convnext_block import fuse_convolution_blocks
from hf_cpu_accel.rewrite.convolution.gemm import GemmConvolutionRule
from hf_cpu_accel.rewrite.convolution.grouped import GroupedConvolutionRule
from hf_cpu_accel.rewrite.convolution.image_of_time import ConvolutionOverTimeRule
from hf_cpu_accel.rewrite.convolution.match import ConvolutionRule
from hf_cpu_accel.rewrite.convolution.neighbors import join_neighbors
from hf_cpu_accel.rewrite.convolution.over_time import keep_channels_last
from hf_cpu_accel.rewrite.convolution.residual_block import fuse_residual_blocks
from hf_cpu_accel.rewrite.convolution.snake import SnakeRule
from hf_cpu_accel.rewrite.convolution.static_images import make_static
from hf_cpu_accel.rewrite.convolution.transposed.images import TransposedImagesRule
from hf_cpu_accel.rewrite.convolution.transposed.over_time import TransposedConvolutionRule
from hf_cpu_accel.rewrite.core.autotune import autotune
from hf_cpu_accel.rewrite.core.casting import cast_all_or_nothing
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.first_call import check_first_calls
from hf_cpu_accel.rewrite.core.float16 import cast_float16, stay_float16_outside
from hf_cpu_accel.rewrite.core.foreign_code import attempt
from hf_cpu_accel.rewrite.core.left_alone import has_weights, items_left, obstacle
from hf_cpu_accel.rewrite.core.refusal import Refusal, refusal_items
from hf_cpu_accel.rewrite.core.rule import Rule, apply_rule, set_rule
from hf_cpu_accel.rewrite.core.whole_parameters import show_packed_weights
from hf_cpu_accel.rewrite.decoder.fuse import fuse_decoder_layers
from hf_cpu_accel.rewrite.encoder.embeddings import EmbeddingsRule
from hf_cpu_accel.rewrite.encoder.fuse import fuse_encoder_layers
from hf_cpu_accel.rewrite.encoder.grid_match import fuse_grid_layers
from hf_cpu_accel.rewrite.encoder.padding import find_padding_readers
from hf_cpu_accel.rewrite.encoder.window_fuse import fuse_window_layers
from hf_cpu_accel.rewrite.experts.match import ExpertsRule
from hf_cpu_accel.rewrite.generation import accelerate_generation
from hf_cpu_accel.rewrite.graph.match import accelerate_message_passing
from hf_cpu_accel.rewrite.hybrid.match import join_recurrent_steps
from hf_cpu_accel.rewrite.latent.match import fuse_latent_attention, fuse_latent_layers
from hf_cpu_accel.rewrite.linear.ffn import FFNRule
from hf_cpu_accel.rewrite.linear.linear_block import LinearBlockRule
from hf_cpu_accel.rewrite.linear.match import LinearRule, MergedProjectionsRule
from hf_cpu_accel.rewrite.linear.nested_ffn import fuse_nested_ffns
from hf_cpu_accel.rewrite.linear.shared import SharedLinearRule
from hf_cpu_accel.rewrite.linear.split_head import SplitHeadRule, fuse_split_heads
from hf_cpu_accel.rewrite.linear.stored import StoredLinearsRule
from hf_cpu_accel.rewrite.linear.tensor_parallel import divide_linears
from hf_cpu_accel.rewrite.linear.transposed import TransposedLinearRule
from hf_cpu_accel.rewrite.norm.group_norm import GroupNormRule
from hf_cpu_accel.rewrite.norm.match import NormRule
from hf_cpu_accel.rewrite.program_layers import record_layers
from hf_cpu_accel.rewrite.progress import with_progress
from hf_cpu_accel.rewrite.quantized.engines import StaticProductRule
from hf_cpu_accel.rewrite.quantized.graph import lower_quantized_graphs
from hf_cpu_accel.rewrite.quantized.images import join_quantized_images
from hf_cpu_accel.rewrite.recurrent.lstm import LSTMRule
from hf_cpu_accel.rewrite.recurrent.match import fuse_recurrent_layers, fuse_recurrent_mixers
from hf_cpu_accel.rewrite.weight_edits import watch_edits


@dataclass(frozen=True)
class Stage:
    """One step of a rewrite.

    Attributes:
        apply: changes the model of a `Context`, only through `context.journal`, and returns rows of the plan, or None.
        trains: whether the stage also runs on models that are trained, whose weights stay as they are.
    """

    name: str
    apply: Callable[[Context], Iterable[PlanItem] | None]
    trains: bool = False


_CONVOLUTIONS: tuple[Rule, ...] = (GemmConvolutionRule(), ConvolutionLinearRule(), ConvolutionRule())

# Larger structures first: rules for parts do not get the modules in them. Modules are visited from the root
# downward, so a linear is only packed alone if no module above it used it.
RULES: tuple[Rule, ...] = (
    EmbeddingsRule(),
    AttentionRule(),
    ProcessorAttentionRule(),
    MultiheadAttentionRule(),
    FFNRule(),
    ExpertsRule(),
    LinearBlockRule(),
    SplitHeadRule(),
    NormRule(),
    GroupNormRule(),
    BatchNormRule(_CONVOLUTIONS),
    *_CONVOLUTIONS,
    ConvolutionOverTimeRule(),
    GroupedConvolutionRule(),
    TransposedConvolutionRule(),
    TransposedImagesRule(),
    SnakeRule(),
    LSTMRule(),
    MergedProjectionsRule(),
    SharedLinearRule(),
    LinearRule(),
    TransposedLinearRule(),
    StoredLinearsRule(),
    StaticProductRule(),
)


def _freeze(context: Context) -> None:
    freeze_parameters(context.journal, context.root)
    set_eval_mode(context.journal, context.root)


def _apply_rules(context: Context) -> Iterable[PlanItem]:
    """Offer each module to the rules, one after another, until one replaces it."""
    for path, module in with_progress(context.tree.modules):
        if context.float16 is not None:
            context.float16.reach(module)
        considered, module = False, with_computed_weight(module, path, context)
        for rule in RULES:
            if id(module) in context.tree.handled:
                break
            set_rule(rule.name, context)
            match = attempt(path, rule.match, module, path, context)
            if match is None or isinstance(match, Refusal):
                continue
            considered = True
            outcome = apply_rule(rule, match, context)
            yield from outcome.items
            context.tree.handled.update(id(handled) for handled in outcome.handled)
        if not considered and id(module) not in context.tree.handled and has_weights(module):
            yield PlanItem.left(path, type(module).__name__, obstacle(path, module, context))
        yield from settle(module, path, context)
    if context.float16 is not None:
        context.float16.finish()


def _say_what_is_left(context: Context) -> Iterable[PlanItem]:
    context.results.items.extend(refusal_items(context.results.refused, context.results.items))
    context.results.notes.extend(unpacked_tensors(context.root))
    return items_left(context.tree.modules, context.results.items, context)


def _find_padding_readers(context: Context) -> None:
    context.results.notes.extend(find_padding_readers(context.root))


def _check_first_calls(context: Context) -> None:
    if context.config.verify == "first":
        check_first_calls(context.root, context.journal)


def _autotune(context: Context) -> None:
    if context.measured:
        autotune(context.root, context.journal)


# First the parts and dtypes of this process, which later stages read. Then from the inside outward: layers are fused after their
# linears, norms and attention are replaced. Stages that watch calls come last.
STAGES: tuple[Stage, ...] = (
    Stage("tensor parallelism", divide_linears),
    Stage("float16 weights", cast_float16),
    Stage("message passing", accelerate_message_passing, trains=True),
    Stage("parameter freezing", _freeze),
    Stage("quantized graphs", lower_quantized_graphs),
    Stage("calibration", calibrate),
    Stage("module rules", _apply_rules),
    Stage("conv1d padding", keep_channels_last),
    Stage("deformable attention", fuse_deformable_attention),
    Stage("sliding windows", fuse_sliding_windows),
    Stage("convolution blocks", fuse_convolution_blocks),
    Stage("residual blocks", fuse_residual_blocks),
    Stage("neighboring blocks", join_neighbors),
    Stage("static ranges", make_static),
    Stage("quantized convolutions", join_quantized_images),
    Stage("nested ffns", fuse_nested_ffns),
    Stage("split heads", fuse_split_heads),
    Stage("recurrent mixers", fuse_recurrent_mixers),
    Stage("recurrent layers", fuse_recurrent_layers),
    Stage("latent attention", fuse_latent_attention),
    Stage("latent layers", fuse_latent_layers),
    Stage("encoder layers", fuse_encoder_layers),
    Stage("window layers", fuse_window_layers),
    Stage("grid layers", fuse_grid_layers),
    Stage("decoder layers", fuse_decoder_layers),
    Stage("recurrent steps", join_recurrent_steps),
    Stage("cached attention", fuse_cached_attention),
    Stage("cached layers", fuse_cached_layers),
    Stage("recorded layers", record_layers),
    Stage("remaining modules", _say_what_is_left),
    Stage("generation", accelerate_generation),
    Stage("dtype casts", cast_all_or_nothing),
    Stage("packed parameters", show_packed_weights),
    Stage("eval mode", lambda context: keep_eval_mode(context.journal, context.root)),
    Stage("padding readers", _find_padding_readers),
    Stage("float16 outputs", stay_float16_outside),
    Stage("weight edits", lambda context: watch_edits(context.root, context.journal)),
    Stage("inner modules", lambda context: watch_inner_modules(context.root)),
    Stage("module classes", lambda context: replace_classes(context.journal)),
    Stage("first calls", _check_first_calls),
    Stage("autotuning", _autotune),
)
