"""State of one rewrite: the model, its settings, and the results of the rules and stages so far."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch import Tensor, nn

from hf_cpu_accel.checkpoints.stored_weight import is_stand_in
from hf_cpu_accel.config import CPUAccelConfig
from hf_cpu_accel.hosts.peft import kept_for_adapters
from hf_cpu_accel.packing.linear import FORMS, QUANTIZED
from hf_cpu_accel.patching.float16 import Float16Model
from hf_cpu_accel.patching.hooks import is_plain
from hf_cpu_accel.patching.originals import OriginalsStore
from hf_cpu_accel.patching.restore import Journal
from hf_cpu_accel.patching.weight_owners import address_of, weight_owners
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.providers import switch
from hf_cpu_accel.rewrite.core.calibrated import CalibratedWeights
from hf_cpu_accel.rewrite.core.calibration import Example
from hf_cpu_accel.rewrite.core.dtype_table import DtypeTable, prefixes_of
from hf_cpu_accel.rewrite.core.layer_stacks import in_plain_lists
from hf_cpu_accel.rewrite.core.norm_fold import Fold, NormAfter
from hf_cpu_accel.rewrite.core.packed_module import PackedModule, reads_weights
from hf_cpu_accel.rewrite.core.packed_source import source
from hf_cpu_accel.rewrite.core.refusal import Refusal, RefusedPart
from hf_cpu_accel.rewrite.core.verify import probe, row_error, run_alone
from hf_cpu_accel.tolerance import FORMULA

WEIGHT_DTYPES = (torch.float32, torch.bfloat16)
# Below this many output features (heads for a few classes) a GEMM kernel works mostly on padding.
MIN_OUT_FEATURES = 16
MAX_INTEGER_FEATURES = 65536
_REPEATED = re.compile(r"(^|\.)\d+(\.|$)")  # a number in the path: one of several alike

NOT_PLAIN = "it has hooks, parametrizations or a replaced forward"


class LayerByLayer(Protocol):
    """Work on each layer when the rules reach it, and at the end on layers that they do not reach."""

    def reach(self, module: nn.Module) -> None: ...

    def finish(self) -> None: ...


@dataclass
class Context:
    """The model under rewrite.

    Attributes:
        dtype: one of `packing.DTYPES`, resolved; see `dtype_at` and `weight_dtype` for a single module.
        name: the name of this model in the target, if the target has several.
        measured: whether other providers may serve where they were measured to be faster.
        slots: the places of each module, as (parent, name): several for a module used twice; none for the root and for `listed`.
        listed: ids of modules that a plain list holds besides their parent (as in Mask2Former): a loop over the list would not
            see a replacement.
        owners: the paths of the parameters, by storage: several where weights are tied.
        has_layers: whether linears repeat in numbered layers, so that those outside of them are heads.
        handled: ids of the modules that a rule has handled, and of those that none may replace: TorchScript's.
        freed: bytes of weights that were released since the heap was last trimmed.
        norms_after: the norms that are packed with convolutions, by the ids of the convolutions.
        kept_for_adapters: reasons why modules stay plain for adapters that read them without a call of the model, by id.
        made: ids of weights that a stage created.
        computed: (plain module that rules are offered, module whose weight it has), by the ids of the first.
        rule: the name of the current rule.
        refused: the parts that are not fused where one would expect it.
        modules: (path, module) of the original tree.
        items, notes: rows and notes of the plan so far.
        float16: the float16 weights, which are float32 during the rewrite; None if there are none. `widening` casts them.
        asked, chosen: dtypes of modules by `config.dtypes`, with their paths in the target; by accuracy, with their paths in
            `root`.
        calibration: the calls of `root` for which four-bit weights are rounded, or which show the ranges of images; `calibrated`
            has the rounded weights.
    """

    root: nn.Module
    config: CPUAccelConfig
    dtype: str
    journal: Journal
    store: OriginalsStore
    slots: dict[int, list[tuple[nn.Module, str]]]
    owners: dict[int, list[str]]
    has_layers: bool
    listed: set[int]
    handled: set[int] = field(default_factory=set)
    freed: int = 0
    norms_after: dict[int, NormAfter] = field(default_factory=dict)
    kept_for_adapters: dict[int, str] = field(default_factory=dict)
    made: set[int] = field(default_factory=set)
    computed: dict[int, tuple[nn.Module, nn.Module]] = field(default_factory=dict)
    measured: bool = False
    name: str = ""
    rule: str = ""
    refused: list[RefusedPart] = field(default_factory=list)
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    items: list[PlanItem] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    float16: Float16Model | None = None
    widening: LayerByLayer | None = None
    asked: DtypeTable = field(default_factory=lambda: DtypeTable(()))
    chosen: DtypeTable = field(default_factory=lambda: DtypeTable(()))
    calibration: tuple[Example, ...] = ()
    calibrated: CalibratedWeights = field(default_factory=CalibratedWeights)

    @classmethod
    def of(
        cls,
        root: nn.Module,
        config: CPUAccelConfig,
        dtype: str,
        journal: Journal,
        store: OriginalsStore,
        *,
        name: str = "",
        chosen: Iterable[tuple[str, str]] = (),
    ) -> Context:
        slots: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
        listed, modules = in_plain_lists(root), list(root.named_modules())
        compiled = {id(module) for _, module in modules if isinstance(module, torch.jit.ScriptModule)}
        for parent in root.modules():
            for child_name, child in parent._modules.items():
                if child is not None and id(child) not in listed | compiled:
                    slots[id(child)].append((parent, child_name))
        has_layers = any(isinstance(module, nn.Linear) and _REPEATED.search(path) for path, module in modules)
        return cls(
            root,
            config,
            dtype,
            journal,
            store,
            slots,
            weight_owners(root),
            has_layers,
            listed,
            kept_for_adapters=kept_for_adapters(root, name),
            measured=switch.measured(config.providers),
            name=name,
            modules=modules,
            handled=compiled,
            asked=DtypeTable(dict(config.dtypes).items()),
            chosen=DtypeTable(chosen),
        )

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

    def refuse(self, path: str, structure: str, refusal: Refusal) -> None:
        """Make `explain()` report why the part at `path` is not fused, unless another rule replaces it."""
        self.refused.append(RefusedPart(PlanItem.left(path, structure, refusal.reason), refusal.yields))

    def skipped(self, path: str) -> bool:
        """Return whether `path` or a module above it matches `skip_modules`."""
        prefixes = prefixes_of(f"{self.name}.{path}")
        return any(
            fnmatchcase(prefix, pattern) for prefix in prefixes for pattern in self.config.skip_modules
        )

    def own_dtype(self, path: str) -> str | None:
        """Return the dtype that settings give to the module at `path`, or None if it has the dtype of the model."""
        return self.asked.of(f"{self.name}.{path}") or self.chosen.of(path)

    def dtype_at(self, path: str) -> str:
        """Return the dtype of the module at `path`, of any kind."""
        return self.own_dtype(path) or self.dtype

    def dtypes_in(self, path: str, module: nn.Module) -> set[str]:
        """Return the dtypes of the linears and packed modules in `module`, which is at `path`."""
        inside = (name for name, part in module.named_modules() if isinstance(part, nn.Linear | PackedModule))
        return {self.dtype_at(f"{path}.{name}") for name in inside} or {self.dtype_at(path)}

    def dtype_names(self, path: str, module: nn.Module) -> str:
        """Return the dtypes of `dtypes_in` joined for the plan."""
        held = self.dtypes_in(path, module)
        return " + ".join(dtype for dtype in FORMS if dtype in held)

    def weight_dtype(self, path: str, linears: Sequence[nn.Linear]) -> str:
        """Return the dtype that `linears`, at or below `path`, are packed in.

        Integers are for linears that repeat in each layer, and for heads with a large vocabulary, which take most of the time. A
        pooler or a head for a few classes costs little and its error goes straight into the output, so it stays float32. With
        int4 a head has 8 bits unless `config.head_dtype` differs: in 4 bits it caused a sixth of the error of a small language
        model. A dtype that settings give to a module by name always wins.
        """
        own = self.own_dtype(path)
        if own is not None:
            return own
        is_head = self.has_layers and not _REPEATED.search(path)
        is_small = all(linear.out_features <= linear.in_features for linear in linears)
        if not is_head:
            return self.dtype
        if self.dtype in QUANTIZED and is_small:
            return "float32"
        if self.config.head_dtype != "auto":
            return self.config.head_dtype
        return "int8" if self.dtype == "int4" else self.dtype

    def other_owner(self, parameter: Tensor, path: str) -> str | None:
        """Return the path of another parameter that shares memory with `parameter` at `path`, or None."""
        return next((owner for owner in self.owners[address_of(parameter)] if owner != path), None)

    def is_tied(self, weight: Tensor) -> bool:
        return len(self.owners[address_of(weight)]) > 1


def refusal_to_swap(module: nn.Module, path: str, context: Context) -> str | None:
    """Return why this module cannot be replaced, or None if it can."""
    if context.skipped(path):
        return "skip_modules"
    if module is context.root:
        return "it is the target itself: it has no parent module to hold the packed layer"
    if id(module) in context.listed:
        return "a plain Python list also holds it, where it cannot be replaced"
    return context.kept_for_adapters.get(id(module)) or (None if is_plain(module) else NOT_PLAIN)


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
    dtype = context.dtype_at(path)
    if dtype in QUANTIZED and linear.in_features > MAX_INTEGER_FEATURES:
        return f"integer sums over {linear.in_features} input features would overflow"
    if linear.weight.dtype not in WEIGHT_DTYPES:
        return f"weights in {linear.weight.dtype} are not supported, only float32 and bfloat16"
    if linear.out_features < MIN_OUT_FEATURES:
        return f"it has only {linear.out_features} output features: packing gains nothing"
    if linear.in_features == 0:
        return "it has no input features"
    if any(reads_weights(parent) for parent, _ in context.slots[id(linear)]):
        return "PyTorch's fused encoder layer reads its weights instead of calling it"
    if (shared := shares_weight(linear, path, context)) is not None:
        return shared
    return None if saved is None else "the saved file has no packed weight for it"


def shares_weight(linear: nn.Linear, path: str, context: Context) -> str | None:
    """Return why a shared weight prevents packing this linear in float32, or None."""
    owner = context.other_owner(linear.weight, f"{path}.weight")
    if owner is None or context.dtype_at(path) != "float32":
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
    return row_error(run_alone(linear, input), expected) <= FORMULA.of(linear.weight.dtype)
