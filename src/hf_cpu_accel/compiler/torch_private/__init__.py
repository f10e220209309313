"""The only folder of the compiler that uses private names of torch, with the versions of torch that they were tested on.

Other code imports the names below from here. `templates.py`, which imports Inductor, is imported separately. If `problem()` returns
a reason, the backend passes graphs to Inductor unchanged.
tests/compiler/test_torch_private.py has a contract for each name.
"""

from __future__ import annotations

from hf_cpu_accel.compiler.torch_private.aot_inductor import load_package, write_package
from hf_cpu_accel.compiler.torch_private.dynamo import counters, is_of_module, is_static_input, without_floats
from hf_cpu_accel.compiler.torch_private.fake_tensors import fake_inputs, fake_mode, trace_aten, tracing
from hf_cpu_accel.compiler.torch_private.inductor import (
    compile_with_inductor,
    has_compiler,
    inductor_default,
    plain_inductor,
    with_pass,
)
from hf_cpu_accel.compiler.torch_private.values import (
    is_always,
    is_higher_order,
    is_plain_tensor,
    is_transform,
    size_seen,
    storage_of,
    sym_sqrt,
)
from hf_cpu_accel.compiler.torch_private.versions import problem, unknown_version

__all__ = [
    "compile_with_inductor",
    "counters",
    "fake_inputs",
    "fake_mode",
    "has_compiler",
    "inductor_default",
    "is_always",
    "is_higher_order",
    "is_of_module",
    "is_plain_tensor",
    "is_static_input",
    "is_transform",
    "load_package",
    "plain_inductor",
    "problem",
    "size_seen",
    "storage_of",
    "sym_sqrt",
    "trace_aten",
    "tracing",
    "unknown_version",
    "with_pass",
    "without_floats",
    "write_package",
]
