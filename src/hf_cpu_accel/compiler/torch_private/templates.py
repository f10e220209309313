"""Inductor templates around a function of the C++ library that returns its results in tiles.

Inductor's own templates for matrix products contain the loops and the inner kernel as source. Here both are in the library, which
calls back with each tile. The pointwise operations that Inductor's scheduler fuses after the template are compiled into that
callback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor import ir
from torch._inductor import lowering as inductor
from torch._inductor.codegen.cpp_gemm_template import gen_2d_view_of_epilogue_buf
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.codegen.cpp_template_kernel import CppTemplateKernel, parse_expr_with_index_symbols
from torch._inductor.codegen.cpp_utils import cexpr_index
from torch._inductor.utils import parallel_num_threads
from torch._inductor.virtualized import V
from torch.fx import Node

Lowering = Callable[..., Any]
_ours: ContextVar[bool] = ContextVar("hf_cpu_accel_lowerings", default=False)
_SOURCE = r"""
{{ header }}
extern "C" {{ kernel.def_kernel(inputs=inputs, outputs={"output": output}, aliases=aliases) }}
{
    {{ kernel.maybe_codegen_profile() }}
    const auto store = [&](const float* tile, int64_t row, int64_t rows, int64_t column, int64_t columns) {
        {{ kernel.store_output(part, tile, results, epilogues, offsets=("row", "column"), reindexers=reindexers)|indent(8, false) }}
    };
    using Store = decltype(store);
    const auto callback = [](void* context, const float* tile, int64_t row, int64_t rows, int64_t column, int64_t columns) {
        (*static_cast<const Store*>(context))(tile, row, rows, column, columns);
    };
    {{ call(kernel)|indent(4, false) }}
}
"""


class TileTemplate(CppTemplate):
    """A template for [rows, columns] that a function of the library computes tile by tile.

    Args:
        inputs: {name: buffer}, dense.
        layout: of the results, [rows, columns].
        tile_stride: the elements from one row of a tile to the next.
        tile_columns: the elements of every row of every tile if that is constant, else None.
        header: source that the call needs.
        call: a function of (the function that writes the address of an input by name, "nullptr" without one; the function that
            writes a size), which returns the source that calls the library with `callback` and the address of `store` as its
            context.
    """

    def __init__(
        self,
        inputs: dict[str, Any],
        layout: Any,
        tile_stride: int,
        tile_columns: int | None,
        header: str,
        call: Callable[[Callable[[str], str], Callable[[Any], str]], str],
    ) -> None:
        # Two inputs may be the same buffer, or parts of one.
        self._inputs = {buffer.get_name(): buffer for buffer in inputs.values()}
        self._places = {
            name: (list(self._inputs).index(buffer.get_name()), buffer.get_layout().offset)
            for name, buffer in inputs.items()
        }
        super().__init__("tiles", list(self._inputs.values()), layout, parallel_num_threads())
        self._tile_stride = tile_stride
        self._tile_columns = "columns" if tile_columns is None else str(tile_columns)
        self._header = header
        self._call = call

    def render(  # type: ignore[override]
        self,
        kernel: CppTemplateKernel,
        template_buffer_node: Any = None,
        flag_template_buffer_has_other_users: bool | None = None,
        epilogue_nodes: Sequence[Any] | None = None,
    ) -> str:
        template: Any = self.output_node if template_buffer_node is None else template_buffer_node
        results, output, output_2d = template, template, template
        epilogues: list[Any] = []
        reindexers: list[Any] = []
        aliases = set()
        if epilogue_nodes:
            if flag_template_buffer_has_other_users:
                # The results themselves are read too, so they are stored besides the epilogue's output.
                results = ir.Buffer(name=f"{template.get_name()}_tiles", layout=template.layout)
                epilogues.append(
                    ir.ComputedBuffer(
                        name=template.get_name(), layout=template.layout, data=_copy_of(results)
                    )
                )
                reindexers.append(None)
            aliases.add(results.get_name())
            epilogues.extend(epilogue_nodes)
            output = epilogue_nodes[-1]
            output_2d, reindexers = gen_2d_view_of_epilogue_buf(
                output,
                template,
                list(epilogue_nodes),
                reindexers,
                default_reindexers=[None] * len(epilogue_nodes),
            )
        # If the number of columns is constant, loops over them need no masks.
        columns = self._tile_columns
        tile = _tile(kernel, ["rows", columns], self._tile_stride)
        part = kernel.slice_nd(output_2d, [("row", "row + rows"), ("column", f"column + {columns}")])
        with ExitStack() as stack:
            if results is not template:
                stack.enter_context(patch.object(V.graph, "get_dtype", self._fake_get_dtype(results)))
            source: str = self._template_from_string(_SOURCE).render(
                kernel=kernel,
                inputs={f"input_{number}": buffer for number, buffer in enumerate(self._inputs.values())},
                output=output,
                aliases={alias: output.get_name() for alias in sorted(aliases)},
                part=part,
                tile=tile,
                results=results,
                epilogues=epilogues,
                reindexers=reindexers or None,
                header=self.header().getvalue() + self._header,
                call=self._call_of,
            )
        return source

    def _call_of(self, kernel: CppTemplateKernel) -> str:
        def size(value: Any) -> str:
            return str(cexpr_index(kernel.rename_indexing(value)))

        def address(name: str) -> str:
            if name not in self._places:
                return "nullptr"
            number, offset = self._places[name]
            return f"input_{number} + {size(offset)}"

        return self._call(address, size)


def _copy_of(buffer: Any) -> Any:
    load = buffer.make_loader()
    return ir.Pointwise(
        device=buffer.get_device_or_error(), dtype=buffer.get_dtype(), inner_fn=load, ranges=buffer.get_size()
    )


def _tile(kernel: CppTemplateKernel, sizes: list[str], stride: int) -> Any:
    """Return the argument `tile` of the callback as a buffer."""
    rows, columns = parse_expr_with_index_symbols(sizes)
    layout = ir.FixedLayout(torch.device("cpu"), torch.float32, [rows, columns], [stride, 1])
    kernel.local_buffers["tile"] = ir.Buffer(name="tile", layout=layout)
    return kernel.local_buffers["tile"]


def in_tiles(template: TileTemplate) -> Any:
    """Return the template's results in Inductor's graph, [rows, columns]."""
    return template.generate().output_node()


def matrix(value: Any) -> Any:
    """Return a tensor [..., columns] of Inductor's graph as a dense matrix in memory."""
    columns = value.get_size()[-1]
    flat = inductor.view(value, [ir.sympy_product(value.get_size()[:-1]), columns])
    return dense(flat)


def dense(value: Any) -> Any:
    """Return a tensor of Inductor's graph, contiguous in memory."""
    return ir.InputsKernel.unwrap_storage_for_input(
        ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(value))
    )


def shaped(value: Any, sizes: Sequence[Any]) -> Any:
    """Return a tensor of Inductor's graph with other sizes."""
    return inductor.view(value, list(sizes))


def known(size: Any) -> int | None:
    """Return a size of Inductor as a number, None if it depends on symbols."""
    return int(size) if getattr(size, "is_number", True) else None


def cpu_layout(dtype: torch.dtype, sizes: Sequence[Any]) -> Any:
    """Return a contiguous layout on the CPU."""
    return ir.FixedLayout(torch.device("cpu"), dtype, list(sizes))


def node_being_lowered() -> Node:
    """Return the node of the graph whose lowering runs."""
    node: Node = V.graph.current_node
    return node


def register(op: Any, lowering: Lowering) -> None:
    """Register a lowering of `op`, used inside `lowerings_in_use`. If it returns None, and elsewhere, the op is called directly."""
    fallback = inductor.fallback_handler(op)

    def lower(*args: Any, **kwargs: Any) -> Any:
        lowered = lowering(*args, **kwargs) if _ours.get() else None
        return fallback(*args, **kwargs) if lowered is None else lowered

    inductor.register_lowering(op, type_promotion_kind=None)(lower)


@contextmanager
def lowerings_in_use() -> Iterator[None]:
    """Inside, Inductor uses the registered lowerings."""
    token = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(token)
