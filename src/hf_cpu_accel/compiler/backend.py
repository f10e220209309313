"""The backend function that `torch.compile(model, backend="hf_cpu_accel")` calls with each graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from hf_cpu_accel.compiler import lowerings, report, torch_private
from hf_cpu_accel.compiler.bind import Bound
from hf_cpu_accel.compiler.capture import NotCaptured, capture
from hf_cpu_accel.compiler.fingerprint import fingerprint
from hf_cpu_accel.compiler.options import Options
from hf_cpu_accel.compiler.passes import run_passes
from hf_cpu_accel.compiler.report import GraphReport
from hf_cpu_accel.compiler.rewriter import Rewriter


def hf_cpu_accel(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo: matching parts become fused ops on packed weights, and Inductor compiles the rest.

    Graphs that need gradients, and graphs that the passes cannot read, are compiled by Inductor alone. Without a C++ compiler the
    rewritten graph runs uncompiled. `report.graphs()` has the result for each graph.

    Args:
        graph_module: the graph from Dynamo.
        example_inputs: its inputs from Dynamo, real tensors.
        mode: one of `options.MODES`, or None.
        options: fields of `options.Options`, or None.

    Returns:
        A function with the signature of `graph_module.forward`.

    Raises:
        ValueError, TypeError: see `Options.of`.
    """
    settings = Options.of(options, mode)
    entry = GraphReport(nodes=len(graph_module.graph.nodes))
    report.add(entry)
    start = time.process_time()
    try:
        return _compile(graph_module, example_inputs, settings, entry)
    finally:
        entry.cpu_seconds = time.process_time() - start


def _compile(
    graph_module: GraphModule, example_inputs: Sequence[Any], options: Options, entry: GraphReport
) -> Callable[..., Any]:
    problem = torch_private.problem()
    if problem is not None:
        report.say(f"{problem}; Inductor compiles the graph without the passes of hf_cpu_accel")
        entry.left = problem
        return torch_private.plain_inductor(graph_module, example_inputs)
    try:
        captured = capture(graph_module, example_inputs)
    except NotCaptured as reason:
        entry.left = str(reason)
        if not _has_compiler():
            return graph_module.forward
        return torch_private.compile_with_inductor(graph_module, example_inputs, dict(options.inductor))
    rewriter = Rewriter(captured, options.dtype)
    entry.rewrites = run_passes(rewriter, options.skip_passes)
    kept, requests = rewriter.finish()
    aten = captured.graph_module
    aten.recompile()
    entry.record(aten.graph)
    inputs = [node.meta["val"] for node in aten.graph.find_nodes(op="placeholder")]
    if not _has_compiler():
        entry.left = "no C++ compiler"
        return Bound(aten.forward, kept, requests)
    patches = {**options.inductor, **torch_private.with_pass(fingerprint)}
    dropped = [scalar for position, scalar in captured.scalars.items() if position not in kept]
    with lowerings.in_use(), torch_private.without_floats(dropped):
        compiled = torch_private.compile_with_inductor(aten, inputs, patches)
    return Bound(compiled, kept, requests)


def _has_compiler() -> bool:
    if torch_private.has_compiler():
        return True
    report.say(
        "no C++ compiler found (install g++ or set CXX): fused ops run, and PyTorch (eager) runs the other ops"
    )
    return False
