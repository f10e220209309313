"""`Plan`: the result of `explain()`. It lists the modules that were replaced, their dtypes, and the modules that were left."""

from __future__ import annotations

import dataclasses
import io
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hf_cpu_accel.config import CPUAccelConfig
from hf_cpu_accel.measure.dtype_choice import Choice

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import nn

Scope = Literal["layer", "block", "part"]
_TABLE_WIDTH = 160


class Structure(str):
    """The name of a structure whose row in the plan covers all modules inside of its module.

    Attributes:
        scope: `"layer"` for a whole layer, `"block"` for several modules of one or several layers, `"part"` for a part of a layer
            that other parts surround.
    """

    scope: Scope

    def __new__(cls, name: str, scope: Scope = "layer") -> Structure:
        structure = super().__new__(cls, name)
        structure.scope = scope
        return structure


@dataclass(frozen=True)
class PlanItem:
    """Describe one module: replaced by an op, or left as it is.

    Attributes:
        name: path of the module in the target.
        structure: the structure that was recognized (`"linear + activation"`), or else the class name.
        op: the op that runs it now (`"linear"`, `"ffn"`, ...); `"-"` if the module was left.
        dtype: dtype of the packed weight, or of the computation for ops without a weight; `"-"` if the module was left.
        packed_bytes: size of the packed weight in bytes.
        reason: why the module was left; None if it was replaced.
        provider: the libraries other than this package that ran it so far, with the numbers of rows
            (`"oneDNN: 65-128 rows"`). `"ours"` if only this package's kernels ran it; `"-"` if the module was left.
        copied_bytes: size in bytes of the copies of the weight in the layouts of other providers.
    """

    name: str
    structure: str
    op: str
    dtype: str
    packed_bytes: int
    reason: str | None
    provider: str = "ours"
    copied_bytes: int = 0

    @property
    def scope(self) -> Scope | None:
        """Return what the row covers besides its own module: a whole `"layer"`, a `"block"`, a `"part"` of a layer, or None."""
        return self.structure.scope if isinstance(self.structure, Structure) else None

    @classmethod
    def left(cls, name: str, structure: str, reason: str) -> PlanItem:
        """Return the item of a module that was left as it is."""
        return cls(name, structure, op="-", dtype="-", packed_bytes=0, reason=reason, provider="-")


@dataclass(frozen=True)
class Plan:
    """Hold the settings that were resolved for this machine, and one `PlanItem` per module.

    Print it for a table, or call `to_dict()`. In a notebook it shows as a tree.

    Attributes:
        items: the modules, in the order of the model.
        dtype: one of `packing.DTYPES`; `"none"` if nothing is accelerated.
        tier: the instruction tier that the kernels use, or `"reference"`.
        threads: number of intra-op threads.
        thread_reason: why this number of threads, as a sentence.
        kernels: `"native"`, or `"reference"` if the extension is not loaded and plain PyTorch ops run.
        providers: whether other providers are measured, and where the results are stored, as a sentence.
        config: the `CPUAccelConfig` in use; None if nothing is accelerated.
        notes: sentences about the model as a whole, such as which padding is computed and why.
        choices: the dtypes chosen for `accuracy=`, one `Choice` per model; empty without `accuracy=`.
    """

    items: tuple[PlanItem, ...]
    dtype: str
    tier: str
    threads: int
    thread_reason: str
    kernels: str
    providers: str = "hf_cpu_accel only"
    config: CPUAccelConfig | None = None
    notes: tuple[str, ...] = ()
    choices: tuple[Choice, ...] = ()

    @property
    def chosen_dtypes(self) -> tuple[tuple[str, str], ...]:
        """Return (path, dtype) of each module that `accuracy=` set to a dtype other than the model's."""
        return tuple(pair for choice in self.choices for pair in choice.dtypes)

    @property
    def replaced(self) -> tuple[PlanItem, ...]:
        """Return the modules that were replaced."""
        return tuple(item for item in self.items if item.reason is None)

    @property
    def left(self) -> tuple[PlanItem, ...]:
        """Return the modules that were left as they are."""
        return tuple(item for item in self.items if item.reason is not None)

    @property
    def packed_bytes(self) -> int:
        """Return the size of all packed weights in bytes."""
        return sum(item.packed_bytes for item in self.items)

    @property
    def copied_bytes(self) -> int:
        """Return the size in bytes of all copies of weights for other providers."""
        return sum(item.copied_bytes for item in self.items)

    @property
    def packed_dtypes(self) -> dict[str, str]:
        """Return {path: dtype} of the modules whose weights are packed."""
        return {item.name: item.dtype for item in self.items if item.packed_bytes}

    def counts(self) -> dict[str, int]:
        """Return the number of replaced modules per structure."""
        return dict(Counter(item.structure for item in self.replaced))

    def with_items(self, items: tuple[PlanItem, ...]) -> Plan:
        """Return a copy of the plan with these items."""
        return dataclasses.replace(self, items=items)

    def with_notes(self, notes: tuple[str, ...]) -> Plan:
        """Return a copy of the plan with these notes."""
        return dataclasses.replace(self, notes=notes)

    def to_dict(self) -> dict[str, Any]:
        """Return all attributes as plain JSON types."""
        fields = dataclasses.asdict(self)
        fields["items"] = [dataclasses.asdict(item) for item in self.items]
        fields["config"] = None if self.config is None else self.config.to_dict()
        return fields

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table

        if not self.items:
            return self._header() + "\nnothing is accelerated: call accelerate_for_cpu(target) first"
        table = Table(box=None, header_style="bold", pad_edge=False)
        has_providers = any(item.provider not in ("ours", "-") for item in self.items)
        for column in ("module", "structure", "op", "dtype", *(["provider"] if has_providers else [])):
            table.add_column(column, overflow="fold")
        table.add_column("packed MB", justify="right")
        table.add_column("left because", overflow="fold")
        for item, count in _collapse_layers(self.items):
            nbytes = item.packed_bytes + item.copied_bytes
            megabytes = f"{nbytes / 1e6:.2f}" if nbytes else ""
            name = item.name if count == 1 else f"{item.name}  x{count}"
            provider = [item.provider] if has_providers else []
            table.add_row(name, item.structure, item.op, item.dtype, *provider, megabytes, item.reason or "")
        return Group(self._header(), table)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=_TABLE_WIDTH, highlight=False, markup=False).print(self)
        return text.getvalue().rstrip()

    def _repr_html_(self) -> str:
        from hf_cpu_accel.plan_tree import tree

        return tree(self.items, self._header())

    def _header(self) -> str:
        copied = (
            f" and {self.copied_bytes / 1e6:.1f} MB copied for other providers" if self.copied_bytes else ""
        )
        return (
            f"{len(self.replaced)} modules replaced, {len(self.left)} left; {self.dtype}; "
            f"{self.kernels} kernels, tier {self.tier}; {self.packed_bytes / 1e6:.1f} MB packed{copied}\n"
            f"{self.threads} threads: {self.thread_reason}\n"
            f"providers: {self.providers}" + "".join(f"\n{line}" for line in (*self.choices, *self.notes))
        )


def make(
    config: CPUAccelConfig,
    module: nn.Module,
    *,
    threads: int,
    thread_reason: str,
    choice: Choice | None = None,
) -> Plan:
    """Resolve `config` for `module` on this machine and return a plan without items.

    Args:
        config: the settings.
        module: the model, which decides what `dtype="auto"` is.
        threads: number of intra-op threads.
        thread_reason: why this number of threads, as a sentence.
        choice: the dtypes that were chosen for `config.accuracy`, if any.
    """
    from hf_cpu_accel.providers.describe import describe
    from hf_cpu_accel.runtime.auto_dtype import auto_dtype

    dtype = auto_dtype(module) if config.dtype == "auto" else config.dtype.removesuffix("-static")
    if choice is not None and choice.dtype != "auto":
        dtype = choice.dtype
    choices = () if choice is None else (choice,)
    kernels, tier = _kernels()
    sentence = describe(config.providers)
    return Plan((), dtype, tier, threads, thread_reason, kernels, sentence, config=config, choices=choices)


def nothing(*, threads: int) -> Plan:
    """Return the plan of a target that is not accelerated."""
    kernels, tier = _kernels()
    return Plan((), "none", tier, threads, "torch's own setting", kernels)


def join(plans: list[Plan]) -> Plan:
    """Join the plans of a target with several models: the settings of the first plan, the items of all."""
    return dataclasses.replace(
        plans[0],
        items=tuple(item for plan in plans for item in plan.items),
        notes=tuple(note for plan in plans for note in plan.notes),
        choices=tuple(choice for plan in plans for choice in plan.choices),
    )


def under(name: str, plan: Plan) -> Plan:
    """Return `plan` with `name`, the name of the model in the target, prefixed to all paths; unchanged if `name` is empty."""
    if not name:
        return plan
    return dataclasses.replace(
        plan,
        items=tuple(dataclasses.replace(item, name=f"{name}.{item.name}") for item in plan.items),
        notes=tuple(f"{name}.{note}" for note in plan.notes),
        choices=tuple(dataclasses.replace(choice, name=name) for choice in plan.choices),
    )


def _kernels() -> tuple[str, str]:
    from hf_cpu_accel import extension

    status = extension.status()
    if status.loaded and status.tier is not None:
        return "native", status.tier
    return "reference", "reference"


def _collapse_layers(items: tuple[PlanItem, ...]) -> list[tuple[PlanItem, int]]:
    """Merge items that differ only in the numbers of their paths; return (item, number merged), with their bytes added up."""
    groups: dict[tuple[str, str], list[PlanItem]] = {}
    for item in items:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", item.name)
        rest = repr((item.structure, item.op, item.dtype, item.provider, item.reason))
        groups.setdefault((pattern, rest), []).append(item)
    return [(_merge(pattern, group), len(group)) for (pattern, _), group in groups.items()]


def _merge(pattern: str, items: list[PlanItem]) -> PlanItem:
    return dataclasses.replace(
        items[0],
        name=items[0].name if len(items) == 1 else pattern,
        packed_bytes=sum(item.packed_bytes for item in items),
        copied_bytes=sum(item.copied_bytes for item in items),
    )
