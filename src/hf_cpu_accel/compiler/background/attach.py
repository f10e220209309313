"""Compiling in the background: attached to an accelerated model, and reported by `explain`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from hf_cpu_accel.compiler.background.bound import Library
from hf_cpu_accel.compiler.background.find import RegionSearch, find_regions
from hf_cpu_accel.compiler.background.forward import BlockForward
from hf_cpu_accel.compiler.background.region import Form, Region
from hf_cpu_accel.compiler.background.toolchain import why_off
from hf_cpu_accel.compiler.torch_private import unknown_version
from hf_cpu_accel.patching.restore import add_attribute
from hf_cpu_accel.plan import CompiledRegion, Plan

if TYPE_CHECKING:
    from hf_cpu_accel.patching.acceleration import Acceleration


@dataclass
class CompiledRegions:
    """The compiled regions of a model, as a change in its journal.

    Attributes:
        mode: `CPUAccelConfig.compile`.
        regions: blocks that are compiled together.
        reason: why there are no regions, or None.
    """

    mode: str
    regions: list[Region]
    reason: str | None = None

    def undo(self) -> None:
        for region in self.regions:
            region.closed = True

    def __getstate__(self) -> dict[str, object]:
        # Copies of the model run level 1.
        return {"mode": self.mode, "regions": [], "reason": "copies of an accelerated model are not compiled"}


def attach(root: nn.Module, acceleration: Acceleration) -> None:
    """Compile the blocks of `root` that no rule has fused, each at its first call."""
    journal, mode = acceleration.journal, acceleration.config.compile
    # The wrapper around each block relies on private names, too.
    unknown = unknown_version()
    search = RegionSearch({}, unknown) if unknown else find_regions(root)
    compiled = CompiledRegions(mode, [], search.reason)
    path = acceleration.config.compiled_bundle
    bundle = None if path is None else Path(path)
    for name, modules in search.regions.items():
        region = Region(name, mode, acceleration.plan.dtype, bundle)
        for module in modules:
            forward = BlockForward(module, region)
            region.blocks.append(forward)
            add_attribute(journal, module, "forward", forward)
        compiled.regions.append(region)
    journal.record(compiled)


def _compiled_regions_of(acceleration: Acceleration) -> CompiledRegions | None:
    return next(
        (change for change in acceleration.journal.changes if isinstance(change, CompiledRegions)), None
    )


def libraries_of(acceleration: Acceleration) -> list[Library]:
    """Return the libraries that were compiled or loaded for a model so far."""
    compiled = _compiled_regions_of(acceleration)
    regions = [] if compiled is None else compiled.regions
    return [library for region in regions for form in region.forms.values() for library in form.libraries]


def with_compiled(plan: Plan, acceleration: Acceleration) -> Plan:
    """Return `plan` with the present state of the regions."""
    compiled = _compiled_regions_of(acceleration)
    if compiled is None:
        return plan
    regions = tuple(row for region in compiled.regions for row in _rows(region))
    recompiles = sum(max(0, len(region.forms) - 1) for region in compiled.regions)
    state = f"{compiled.mode}: {_describe_state(compiled, regions)}"
    return dataclasses.replace(plan, compile_state=state, recompiles=recompiles, compiled=regions)


def _describe_state(compiled: CompiledRegions, regions: tuple[CompiledRegion, ...]) -> str:
    off = why_off()
    has_regions = (
        bool(regions) or unknown_version() is not None
    )  # with an unknown version no region is searched
    has_libraries = any(row.graphs for row in regions)  # compiled elsewhere, or before
    if off and has_regions and not has_libraries:
        return f"off, {off}; level 1 runs"
    return f"nothing, {compiled.reason}" if compiled.reason else _summary(regions)


def _summary(regions: tuple[CompiledRegion, ...]) -> str:
    counts = {
        state: sum(row.state == state for row in regions) for state in dict.fromkeys(r.state for r in regions)
    }
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def _state(form: Form) -> tuple[str, str | None]:
    """Return the state of a form as in `CompiledRegion`, and the reason."""
    decided = [verdict.faster for verdict in form.verdicts.values() if verdict.faster is not None]
    if form.state == "left":
        return "level 1", form.reason
    if form.state == "compiled" and any(decided):
        return "switched", form.reason
    if form.state == "compiled" and decided:
        return "level 1", "the compiled form was not faster"
    return "measuring" if form.state == "compiled" else form.state, form.reason


def _rows(region: Region) -> list[CompiledRegion]:
    """Return one row for each form of call; a row "waiting" before the first call."""
    name, blocks = region.name, len(region.blocks)
    if not region.forms and region.other_calls is None:
        return [CompiledRegion(name, blocks, "waiting", "not called yet")]
    rows = []
    for form in list(region.forms.values()):
        verdicts = [verdict for verdict in form.verdicts.values() if verdict.faster is not None]
        gains = tuple(round(verdict.gain, 2) for verdict in verdicts)
        state, reason = _state(form)
        graphs = [library.compiled.graph for library in form.libraries]
        rows.append(
            CompiledRegion(
                name,
                blocks,
                state,
                reason,
                gains,
                round(form.cpu_seconds, 1),
                len(form.libraries),
                form.cached,
                graphs[0].rewrites if graphs else {},
                graphs[0].ours if graphs else {},
                graphs[0].rest if graphs else {},
            )
        )
    if region.other_calls:
        rows.append(CompiledRegion(name, blocks, "level 1", region.other_calls))
    return rows
