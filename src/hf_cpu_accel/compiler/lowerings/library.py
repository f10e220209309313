"""The C++ source that calls the library from generated code, and the check whether generating it pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from hf_cpu_accel import extension
from hf_cpu_accel.abi import VERSION

aten = torch.ops.aten
_VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
)
_TILES = (Path(extension.__file__).parent / "csrc/ops/tiles.h").read_text().replace("#pragma once\n", "")
# The address of a table of functions, looked up through the dispatcher, so that nothing has to be linked.
_LOOKUP = r"""
static const hf_cpu_accel_tiles::Library& hf_cpu_accel_library() {
    static const auto* library = [] {
        StableIValue address = 0;
        const bool failed = aoti_torch_call_dispatcher("hf_cpu_accel::tile_library", "", &address);
        const auto* found = failed ? nullptr : reinterpret_cast<const hf_cpu_accel_tiles::Library*>(address);
        if (!found || found->version != hf_cpu_accel_tiles::version || found->abi != ABI_VERSION)
            throw std::runtime_error("this code was compiled for another version of hf_cpu_accel; compile it again");
        return found;
    }();
    return *library;
}
""".replace("ABI_VERSION", str(VERSION))


# With AOTInductor and `cpp_wrapper` all functions of a graph are in one file.
HEADER = f"#ifndef HF_CPU_ACCEL_TILES\n#define HF_CPU_ACCEL_TILES\n{_TILES}{_LOOKUP}#endif\n"


class Source:
    """Writes a call's arguments.

    Args:
        buffers: {name: tensor of Inductor's graph}.
        address: returns the source of the address of a buffer, "nullptr" for any other name.
        size: returns the source of a number that may depend on symbols.
    """

    def __init__(
        self, buffers: dict[str, Any], address: Callable[[str], str], size: Callable[[Any], str]
    ) -> None:
        self.buffers = buffers
        self.address = address
        self.size = size

    def rows(self, name: str) -> str:
        """Return the source of the struct Rows of a dense matrix or vector."""
        if name not in self.buffers:
            return "{nullptr, 0, false}"
        buffer = self.buffers[name]
        halves = str(buffer.get_dtype() is torch.bfloat16).lower()
        return f"{{{self.address(name)}, {self.size(buffer.get_size()[-1])}, {halves}}}"


def struct(kind: str, fields: dict[str, Any]) -> str:
    """Return the source of a `call` of a struct of tiles.h, with `fields` by name, and store and context added."""
    fields = {**fields, "store": "callback", "context": "const_cast<void*>(static_cast<const void*>(&store))"}
    assignments = "".join(f"call.{name} = {value};\n" for name, value in fields.items())
    return f"hf_cpu_accel_tiles::{kind} call{{}};\n{assignments}"


def has_pointwise_user(node: Node) -> bool:
    """Return whether Inductor may fuse an op after `node`."""
    return any(torch.Tag.pointwise in getattr(user.target, "tags", ()) for user in _users(node))


def _users(node: Node) -> Iterator[Node]:
    for user in node.users:
        if user.target in _VIEWS:
            yield from _users(user)
        else:
            yield user
