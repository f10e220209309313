"""csrc/abi.h, from the description in src/hf_cpu_accel/abi.py.

    python -m tests.abi          # rewrites csrc/abi.h; then rebuild the kernels

The description is read by its path, because the package does not import with the kernels of an earlier version.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "hf_cpu_accel"
HEADER = PACKAGE / "csrc" / "abi.h"
_TYPES = {int: "int64_t", float: "double"}


def description() -> ModuleType:
    """Load abi.py without the package."""
    spec = spec_from_file_location("abi_description", PACKAGE / "abi.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def text(abi: Any) -> str:
    """Return the header of a description."""
    return "\n".join(
        [
            "// The enumerations and structs whose numbers Python and the kernels share. `python -m tests.abi` writes this file",
            "// from src/hf_cpu_accel/abi.py: edit that, run the command, and rebuild the kernels. Plain data, as in gemm/gemm.h.",
            "#pragma once",
            "#include <cstddef>",
            "#include <cstdint>",
            "",
            "// clang-format off",
            "namespace hfca {",
            "",
            f"constexpr int64_t current_abi = 0x{abi.VERSION:012x};",
            *(line for part in abi.ENUMERATIONS for line in ("", *_enumeration(part))),
            *(line for part in abi.STRUCTS for line in ("", *_struct(abi, part))),
            "",
            "}  // namespace hfca",
            "// clang-format on",
            "",
        ]
    )


def _enumeration(part: Any) -> Iterator[str]:
    yield from (f"// {line}" for line in part.comment.splitlines())
    identifiers = (member.replace(" ", "_").replace("-", "_") for member in part.members)
    members = ", ".join(f"{identifier} = {number}" for number, identifier in enumerate(identifiers))
    yield f"enum class {part.name} : int {{ {members} }};"
    for name, count in part.counts.items():
        yield f"constexpr int {name} = {count};"
    if part.names:
        listed = ", ".join(f'"{member}"' for member in part.members)
        yield f"constexpr const char* {part.names}[] = {{{listed}}};"


def _struct(abi: Any, struct: type) -> Iterator[str]:
    """Yield the struct, and assertions of its size and of the offset of each field."""
    fields = struct.__annotations__
    yield f"struct {struct.__name__} {{"
    yield from (f"  {_TYPES.get(kind, kind.__name__)} {name};" for name, kind in fields.items())
    yield "};"
    number = "sizeof(double)" if float in fields.values() else "sizeof(int64_t)"
    yield f"static_assert(sizeof({struct.__name__}) == {len(abi.columns(struct))} * {number});"
    offset = 0
    for name, kind in fields.items():
        yield f"static_assert(offsetof({struct.__name__}, {name}) == {offset} * {number});"
        offset += len(abi.columns(kind)) if is_dataclass(kind) else 1


def main() -> None:
    abi = description()
    HEADER.write_text(text(abi))
    print(f"{HEADER.relative_to(PACKAGE.parents[1])}: version {abi.VERSION:012x}; now rebuild the kernels")


if __name__ == "__main__":
    main()
