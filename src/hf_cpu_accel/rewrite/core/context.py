"""The context of one rewrite: the model, its settings, and the results of the rules and stages so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Protocol

import torch
from torch import nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.checkpoints.stored_weight import is_stand_in
from hf_cpu_accel.packing.linear import QUANTIZED
from hf_cpu_accel.patching.float16 import Float16Model
from hf_cpu_accel.patching.hooks import is_plain
from hf_cpu_accel.patching.originals import OriginalsStore
from hf_cpu_accel.patching.restore import Journal, swap_module
from hf_cpu_accel.plan import Plan, PlanItem
from hf_cpu_accel.providers import switch
from hf_cpu_accel.rewrite.core.calibration import Example
from hf_cpu_accel.rewrite.core.dtype_table import Dtypes, prefixes_of
from hf_cpu_accel.rewrite.core.model_tree import ModelTree, Weights
from hf_cpu_accel.rewrite.core.norm_fold import Fold, NormAfter
from hf_cpu_accel.rewrite.core.packed_module import reads_weights
from hf_cpu_accel.rewrite.core.packed_source import source
from hf_cpu_accel.rewrite.core.refusal import Refusal, RefusedPart
from hf_cpu_accel.rewrite.core.verify import probe, run_alone
from hf_cpu_accel.tolerance import FORMULA

WEIGHT_DTYPES = (torch.float32, torch.bfloat16)
# Below this many output features (heads for a few classes) a GEMM kernel works mostly on padding.
MIN_OUT_FEATURES = 16
MAX_INTEGER_FEATURES = 65536

NOT_PLAIN = "it has hooks, parametrizations or a replaced forward"


class Float16Weights(Protocol):
    """The float16 weights of a model, which are float32 during the rewrite.

    Attributes:
        model: the model for callers.
    """

    model: Float16Model

    def reach(self, module: nn.Module) -> None:
        """Cast the weights of a layer, which the rules reach now."""

    def finish(self) -> None:
        """Cast the weights of layers that the rules did not reach."""


@dataclass
class Results:
    """What stages report for the plan.

    Attributes:
        items: the rows.
        notes: the notes.
        refused: the parts that are not fused where one would expect it.
    """

    items: list[PlanItem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refused: list[RefusedPart] = field(default_factory=list)


class Context:
    """The model under rewrite.

    Attributes:
        root, config: the model, and its settings.
        name: the name of the model in the target, if the target has several.
        journal, store: the changes, and the original weights.
        calibration: the calls of `root` for which four-bit weights are rounded, or which show the ranges of images.
        dtypes, tree, weights: the dtypes, modules and weights of the model.
        results: rows and notes of the plan so far.
        float16: the float16 weights; None if there are none.
        norms_after: the norms that are packed with convolutions, by the ids of the convolutions.
        rule: the name of the current rule.
    """

    def __init__(
        self,
        root: nn.Module,
        plan: Plan,
        journal: Journal,
        store: OriginalsStore,
        *,
        name: str = "",
        calibration: Sequence[Example] = (),
    ) -> None:
        assert plan.config is not None
        self.root, self.config, self.name = root, plan.config, name
        self.journal, self.store, self.calibration = journal, store, tuple(calibration)
        self.dtypes, self.tree, self.weights = Dtypes(root, plan, name), ModelTree(root, name), Weights(root)
        self.results = Results()
        self.float16: Float16Weights | None = None
        self.norms_after: dict[int, NormAfter] = {}
        self.rule = ""

    @cached_property
    def measured(self) -> bool:
        """Return whether other providers may serve where they were measured to be faster."""
        return switch.measured(self.config.providers)

    @property
    def static(self) -> bool:
        """Return whether images pass between convolutions as int8."""
        return self.config.dtype == "int8-static"

    @property
    def verifies(self) -> bool:
        """Return whether replacements are compared with their originals. Packed weights from a file have no original to compare
        with."""
        return bool(self.config.verify) and source() is None

    def fold_after(self, convolution: nn.Module) -> Fold | None:
        """Return the scale and shift of the norm that is packed with `convolution`, or None."""
        after = self.norms_after.get(id(convolution))
        return None if after is None else after.fold

    def swap(self, module: nn.Module, replacement: nn.Module) -> None:
        """Put `replacement` in all places of `module`."""
        swap_module(self.journal, self.tree.slots[id(module)], replacement)

    def refuse(self, path: str, structure: str, refusal: Refusal) -> None:
        """Make `explain()` report why the part at `path` is not fused, unless another rule replaces it."""
        self.results.refused.append(
            RefusedPart(PlanItem.left(path, structure, refusal.reason), refusal.yields)
        )

    def skipped(self, path: str) -> bool:
        """Return whether `path` or a module above it matches `skip_modules`."""
        prefixes = prefixes_of(f"{self.name}.{path}")
        return any(
            fnmatchcase(prefix, pattern) for prefix in prefixes for pattern in self.config.skip_modules
        )


def refusal_to_swap(module: nn.Module, path: str, context: Context) -> str | None:
    """Return why this module cannot be replaced, or None if it can."""
    if context.skipped(path):
        return "skip_modules"
    if module is context.root:
        return "it is the target itself: it has no parent module to hold the packed layer"
    return context.tree.obstacles.get(id(module)) or (None if is_plain(module) else NOT_PLAIN)


def linear_refusal(linear: nn.Module, path: str, context: Context) -> str | None:
    """Return why this linear is not packed, or None if it can be."""
    if not isinstance(linear, nn.Linear) or not (type(linear) is nn.Linear or _overrides_alike(linear)):
        return f"{type(linear).__name__} is not a plain nn.Linear"
    fixed = refusal_to_swap(linear, path, context)
    if fixed is not None:
        return fixed
    if not isinstance(linear.weight, torch.Tensor) or linear.weight.shape != (
        linear.out_features,
        linear.in_features,
    ):
        return "its weight is not of shape [out_features, in_features]"
    if is_stand_in(linear.weight):
        return f"its weight is a {type(linear.weight).__name__}, which cannot be read"
    saved = source()
    if saved is not None and saved.has(linear.weight):
        return None
    dtype = context.dtypes.at(path)
    if dtype in QUANTIZED and linear.in_features > MAX_INTEGER_FEATURES:
        return f"integer sums over {linear.in_features} input features would overflow"
    if linear.weight.dtype not in WEIGHT_DTYPES:
        return f"weights in {linear.weight.dtype} are not supported, only float32 and bfloat16"
    if linear.out_features < MIN_OUT_FEATURES:
        return f"it has only {linear.out_features} output features: packing gains nothing"
    if linear.in_features == 0:
        return "it has no input features"
    if any(reads_weights(parent) for parent, _ in context.tree.slots[id(linear)]):
        return "PyTorch's fused encoder layer reads its weights instead of calling it"
    if (shared := shares_weight(linear, path, context)) is not None:
        return shared
    return None if saved is None else "the saved file has no packed weight for it"


def shares_weight(linear: nn.Linear, path: str, context: Context) -> str | None:
    """Return why a shared weight prevents packing this linear in float32, or None."""
    owner = context.weights.other_owner(linear.weight, f"{path}.weight")
    if owner is None or context.dtypes.at(path) != "float32":
        return None
    return f"it shares its weight with {owner}: packing would store it twice"


def _overrides_alike(linear: nn.Linear) -> bool:
    """Return whether the class of `linear` only rewrites the forward of a linear (as Falcon does) and adds nothing to it.

    A subclass that keeps the forward has another purpose, for example that its weight is read directly.
    """
    if type(linear).forward is nn.Linear.forward:
        return False
    if set(linear._parameters) - {"weight", "bias"} or linear._modules or linear._buffers:
        return False
    if linear.weight.dtype not in WEIGHT_DTYPES or linear.in_features == 0:
        return False
    if linear.weight.shape != (linear.out_features, linear.in_features):
        return False
    input = probe(linear.in_features, linear.weight.dtype)
    with torch.no_grad():
        expected = nn.Linear.forward(linear, input)
    return compare(run_alone(linear, input), expected).within(FORMULA.of(linear.weight.dtype))
