"""`Plan`: what was replaced by what, at which dtype, and what was left and why. It is what `explain()` prints."""

from __future__ import annotations

import dataclasses
import io
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_cpu_accel.config import CPUAccelConfig
from hf_cpu_accel.measure.dtype_choice import Choice

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import nn

_TABLE_WIDTH = 160


@dataclass(frozen=True)
class PlanItem:
    """One module that was considered.

    Attributes:
        name: its path in the target.
        structure: what was recognized (`"linear + activation"`), or the class name if nothing was.
        op: what serves it now (`"linear"`, `"ffn"`, ...), or `"-"` if it was left.
        dtype: of the packed weight, or of the computation for ops without one; `"-"` if it was left.
        packed_bytes: size of the packed weight in bytes.
        reason: None if it was replaced, else why it was left.
        provider: by whom and for how many rows it was served so far where not by our kernels (`"oneDNN: 65-128 rows"`), else
            `"ours"`; `"-"` if it was left.
        copied_bytes: size of the weight's copies in the layouts of other providers.
    """

    name: str
    structure: str
    op: str
    dtype: str
    packed_bytes: int
    reason: str | None
    provider: str = "ours"
    copied_bytes: int = 0

    @classmethod
    def left(cls, name: str, structure: str, reason: str) -> PlanItem:
        return cls(name, structure, op="-", dtype="-", packed_bytes=0, reason=reason, provider="-")


@dataclass(frozen=True)
class CompiledRegion:
    """Blocks that are alike, called in one form, and what the compiled tier made of that.

    Attributes:
        name: the path of the blocks, `*` for their number.
        blocks: how many there are.
        state: `"waiting"` (for a call), `"compiling"`, `"measuring"`, `"switched"` or `"level 1"`.
        reason: why level 1 stays, or some blocks stay with it; None if all were switched.
        gains: how many times faster than level 1 it was measured to be, one number per size of input.
        cpu_seconds: spent on compiling, the C++ compiler included.
        graphs, cached: libraries in use, and how many of them were found on disk.
        rewrites, ours, rest: of the first graph: {pass: matches}, {op of ours: calls}, {other op: calls}.
    """

    name: str
    blocks: int
    state: str
    reason: str | None = None
    gains: tuple[float, ...] = ()
    cpu_seconds: float = 0.0
    graphs: int = 0
    cached: int = 0
    rewrites: dict[str, int] = field(default_factory=dict)
    ours: dict[str, int] = field(default_factory=dict)
    rest: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        gains = ", ".join(f"{gain:.2f}x of level 1" for gain in self.gains)
        cost = "from disk" if self.graphs and self.cached == self.graphs else f"{self.cpu_seconds:.1f} CPU-s"
        told = [self.state, *([f"({self.reason})"] if self.reason else [])]
        told += [gains] * bool(gains) + [cost] * bool(self.graphs)
        return f"compiled: {self.name} x{self.blocks}: {', '.join(told)}"


@dataclass(frozen=True)
class Plan:
    """The settings that were resolved for this machine, and one `PlanItem` per module considered.

    Attributes:
        dtype: one of `packing.DTYPES`; `"none"` if nothing is accelerated.
        tier: the instruction tier that the kernels use, or `"reference"`.
        threads, thread_reason: intra-op threads, and the sentence that says why so many.
        kernels: `"native"`, or `"reference"` if the extension is not loaded and plain torch serves.
        providers: the sentence that says whether other providers are measured, and where that is kept.
        compile_state, recompiles: of the compiled tier in a few words, and how often a new form of call was compiled.
        compiled: the same region by region.
        config: what was asked for, None if nothing is accelerated.
        notes: what holds for a model as a whole, in sentences: which padding is computed and why.
        choices: what was chosen for `accuracy`, where that was asked for: one for each model.
    """

    items: tuple[PlanItem, ...]
    dtype: str
    tier: str
    threads: int
    thread_reason: str
    kernels: str
    providers: str = "hf_cpu_accel only"
    compile_state: str = "off"
    recompiles: int = 0
    compiled: tuple[CompiledRegion, ...] = ()
    config: CPUAccelConfig | None = None
    notes: tuple[str, ...] = ()
    choices: tuple[Choice, ...] = ()

    @property
    def chosen_dtypes(self) -> tuple[tuple[str, str], ...]:
        """(path, dtype) of what was given another dtype for `accuracy`."""
        return tuple(pair for choice in self.choices for pair in choice.dtypes)

    @property
    def replaced(self) -> tuple[PlanItem, ...]:
        return tuple(item for item in self.items if item.reason is None)

    @property
    def left(self) -> tuple[PlanItem, ...]:
        return tuple(item for item in self.items if item.reason is not None)

    @property
    def packed_bytes(self) -> int:
        return sum(item.packed_bytes for item in self.items)

    @property
    def copied_bytes(self) -> int:
        return sum(item.copied_bytes for item in self.items)

    @property
    def packed_dtypes(self) -> dict[str, str]:
        """{path: dtype} of the modules whose weights are packed."""
        return {item.name: item.dtype for item in self.items if item.packed_bytes}

    def counts(self) -> dict[str, int]:
        """How many modules of each structure were replaced."""
        return dict(Counter(item.structure for item in self.replaced))

    def with_items(self, items: tuple[PlanItem, ...]) -> Plan:
        return dataclasses.replace(self, items=items)

    def with_notes(self, notes: tuple[str, ...]) -> Plan:
        return dataclasses.replace(self, notes=notes)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON types."""
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
        others = any(item.provider not in ("ours", "-") for item in self.items)
        for column in ("module", "structure", "op", "dtype", *(["provider"] if others else [])):
            table.add_column(column, overflow="fold")
        table.add_column("packed MB", justify="right")
        table.add_column("left because", overflow="fold")
        for item, count in _collapse_layers(self.items):
            held = item.packed_bytes + item.copied_bytes
            megabytes = f"{held / 1e6:.2f}" if held else ""
            name = item.name if count == 1 else f"{item.name}  x{count}"
            provider = [item.provider] if others else []
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
            f"{self.kernels} kernels, tier {self.tier}; {self.packed_bytes / 1e6:.1f} MB packed{copied}; "
            f"compile {self.compile_state}, {self.recompiles} recompiles\n"
            f"{self.threads} threads: {self.thread_reason}\n"
            f"providers: {self.providers}"
            + "".join(f"\n{line}" for line in (*self.choices, *self.notes, *self.compiled))
        )


def make(
    config: CPUAccelConfig,
    module: nn.Module,
    *,
    threads: int,
    thread_reason: str,
    choice: Choice | None = None,
) -> Plan:
    """The plan without items: `config` resolved for `module` on this machine, by `choice` if its dtypes were chosen."""
    from hf_cpu_accel.providers.describe import describe

    dtype = _auto_dtype(module) if config.dtype == "auto" else config.dtype.removesuffix("-static")
    if choice is not None and choice.dtype != "auto":
        dtype = choice.dtype
    choices = () if choice is None else (choice,)
    kernels, tier = _kernels()
    sentence = describe(config.providers)
    return Plan((), dtype, tier, threads, thread_reason, kernels, sentence, config=config, choices=choices)


def nothing(*, threads: int) -> Plan:
    """The plan of a target that is not accelerated."""
    kernels, tier = _kernels()
    return Plan((), "none", tier, threads, "torch's own setting, nothing was changed", kernels)


def join(plans: list[Plan]) -> Plan:
    """One plan for a target of several roots: the settings of the first, the items of all."""
    return dataclasses.replace(
        plans[0],
        items=tuple(item for plan in plans for item in plan.items),
        compiled=tuple(region for plan in plans for region in plan.compiled),
        recompiles=sum(plan.recompiles for plan in plans),
        notes=tuple(note for plan in plans for note in plan.notes),
        choices=tuple(choice for plan in plans for choice in plan.choices),
    )


def under(name: str, plan: Plan) -> Plan:
    """`plan` with paths that begin with `name`, which is what the target calls the model; as it is if that is empty."""
    if not name:
        return plan
    return dataclasses.replace(
        plan,
        items=tuple(dataclasses.replace(item, name=f"{name}.{item.name}") for item in plan.items),
        compiled=tuple(dataclasses.replace(part, name=f"{name}.{part.name}") for part in plan.compiled),
        notes=tuple(f"{name}.{note}" for note in plan.notes),
        choices=tuple(dataclasses.replace(choice, name=name) for choice in plan.choices),
    )


def _auto_dtype(module: nn.Module) -> str:
    """bfloat16 where it is faster than float32, else float32.

    It is where the CPU multiplies it faster, and for models that generate text on any CPU: they read all weights for each token, so
    half the bytes are half the time. Weights that are bfloat16 already would gain nothing from being held as float32.
    """
    import torch

    from hf_cpu_accel.runtime import hardware

    can_generate = getattr(module, "can_generate", None)
    generates = callable(can_generate) and bool(can_generate())
    weights = [parameter for parameter in module.parameters() if parameter.dim() >= 2]
    narrow = bool(weights) and all(weight.dtype is torch.bfloat16 for weight in weights)
    return "bfloat16" if generates or narrow or hardware.native_bf16_is_fast() else "float32"


def _kernels() -> tuple[str, str]:
    from hf_cpu_accel import extension

    status = extension.status()
    if status.loaded and status.tier is not None:
        return "native", status.tier
    return "reference", "reference"


def _collapse_layers(items: tuple[PlanItem, ...]) -> list[tuple[PlanItem, int]]:
    """Rows that differ only in the numbers of their path become one, with the sum of their bytes."""
    rows: dict[tuple[str, str], list[PlanItem]] = {}
    for item in items:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", item.name)
        rest = repr((item.structure, item.op, item.dtype, item.provider, item.reason))
        rows.setdefault((pattern, rest), []).append(item)
    return [(_together(pattern, alike), len(alike)) for (pattern, _), alike in rows.items()]


def _together(pattern: str, alike: list[PlanItem]) -> PlanItem:
    return dataclasses.replace(
        alike[0],
        name=alike[0].name if len(alike) == 1 else pattern,
        packed_bytes=sum(item.packed_bytes for item in alike),
        copied_bytes=sum(item.copied_bytes for item in alike),
    )
