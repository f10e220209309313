"""Fake tensors, and tracing graphs of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule


def fake_inputs(inputs: Sequence[Any]) -> list[Any]:
    """Return Dynamo's example inputs as fake tensors, with Dynamo's symbolic sizes."""
    from torch._guards import TracingContext

    context = TracingContext.get()
    mode = context.fake_mode
    assert mode is not None, "a backend is called while Dynamo traces"
    fakes = []
    for input in inputs:
        if not isinstance(input, Tensor):
            fakes.append(input)
            continue
        known = context.tensor_to_context.get(input)
        source = None if known is None else known.tensor_source
        # Dynamo has fakified this tensor before: with the same context it gets the same symbols.
        fakes.append(mode.from_tensor(input, symbolic_context=known, source=source, trace=known is None))
    return fakes


def fake_mode() -> Any:
    """Return the mode of the fake inputs of the graph being compiled."""
    from torch._guards import TracingContext

    return TracingContext.get().fake_mode


def tracing(mode: Any) -> AbstractContextManager[Any]:
    """Return a context for tracing graphs of fake tensors: without gradients, and with new tensors fake."""
    from torch._dispatch.python import enable_python_dispatcher

    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(mode)
    stack.enter_context(enable_python_dispatcher())
    return stack


def trace_aten(graph: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """Trace `graph` to ATen ops without decompositions: linear, layer_norm, gelu and scaled_dot_product_attention stay one op."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(graph, decomposition_table={}, pre_dispatch=True)(*inputs)
