"""The only folder of the compiler that uses private names of torch, with the versions of torch that they were tested on.

Other code imports the names below from here. `templates.py`, which imports Inductor, is imported separately. If `problem()` returns
a reason, nothing is compiled in the background, and the backend passes graphs to Inductor unchanged.
tests/compiler/test_torch_private.py has a contract for each name.
"""

from __future__ import annotations

from hf_cpu_accel.compiler.torch_private.aot_inductor import (
    load_library,
    load_package,
    write_library,
    write_package,
)
from hf_cpu_accel.compiler.torch_private.dynamo import counters, is_of_module, is_static_input, without_floats
from hf_cpu_accel.compiler.torch_private.export import free_sizes, guards_of, nested, ranges_of, written_spec
from hf_cpu_accel.compiler.torch_private.fake_tensors import (
    as_if_traced,
    fake_inputs,
    fake_mode,
    trace_aten,
    tracing,
)
from hf_cpu_accel.compiler.torch_private.inductor import (
    compile_with_inductor,
    has_compiler,
    inductor_default,
    inductor_folder,
    inductor_in,
    plain_inductor,
    with_pass,
)
from hf_cpu_accel.compiler.torch_private.values import (
    is_always,
    is_higher_order,
    is_plain_tensor,
    is_transform,
    modes_are_on,
    size_seen,
    storage_of,
    sym_sqrt,
)
from hf_cpu_accel.compiler.torch_private.versions import problem, unknown_version

__all__ = [
    "as_if_traced",
    "compile_with_inductor",
    "counters",
    "fake_inputs",
    "fake_mode",
    "free_sizes",
    "guards_of",
    "has_compiler",
    "inductor_default",
    "inductor_folder",
    "inductor_in",
    "is_always",
    "is_higher_order",
    "is_of_module",
    "is_plain_tensor",
    "is_static_input",
    "is_transform",
    "load_library",
    "load_package",
    "modes_are_on",
    "nested",
    "plain_inductor",
    "problem",
    "ranges_of",
    "size_seen",
    "storage_of",
    "sym_sqrt",
    "trace_aten",
    "tracing",
    "unknown_version",
    "with_pass",
    "without_floats",
    "write_library",
    "write_package",
    "written_spec",
]
