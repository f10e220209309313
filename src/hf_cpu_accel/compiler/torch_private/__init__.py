"""The only folder that touches names of torch which carry no promise, with the versions of torch on which they were checked.

Everything else around it imports from here; `templates.py` has what brings code of ours into Inductor's. `problem()` says why the
names cannot be used; the backend then hands the graph to Inductor as it is.
"""

from __future__ import annotations

import json
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

# torch "major.minor" -> how it was checked. A version that is missing is served by plain Inductor.
CHECKED = {
    "2.13": "tests/compiler on 2.13.0+cpu",
}


sym_sqrt: Any = getattr(torch, "_sym_sqrt", None)  # what graphs of symbolic numbers call for math.sqrt
_MODULES = (
    # First, as it imports the code generators in an order in which they find each other.
    "torch._inductor.lowering",
    "torch._dispatch.python",
    "torch._dynamo.symbolic_convert",
    "torch._dynamo.utils",
    "torch._guards",
    "torch._inductor.codegen.cpp_gemm_template",
    "torch._inductor.codegen.cpp_template_kernel",
    "torch._inductor.compile_fx",
    "torch._inductor.cpp_builder",
    "torch._inductor.custom_graph_pass",
    "torch._inductor.runtime.cache_dir_utils",
    "torch.fx.experimental.proxy_tensor",
)


@lru_cache(maxsize=1)
def problem() -> str | None:
    """Why the private names cannot be relied upon, None if they can."""
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in CHECKED:
        return f"torch {torch.__version__} is not among the versions it was checked on ({', '.join(CHECKED)})"
    for name in _MODULES:
        try:
            import_module(name)
        except ImportError as error:
            return f"torch {torch.__version__} lacks a module that it needs: {error}"
    return None


def counters(name: str) -> Counter[str]:
    """Dynamo's counters of that name."""
    from torch._dynamo.utils import counters

    return counters[name]


def compile_with_inductor(
    graph: GraphModule, inputs: Sequence[Any], patches: dict[str, Any]
) -> Callable[..., Any]:
    """Inductor's answer to `graph`, with `patches` to its config for this graph alone.

    It takes ownership of the graph.
    """
    from torch._inductor.compile_fx import compile_fx

    for node in graph.graph.find_nodes(op="placeholder"):
        # With `cpp_wrapper` Inductor would take these for the inputs, and nothing for the symbolic sizes among them.
        node.meta.pop("val", None)
    compiled: Any = compile_fx(graph, list(inputs), config_patches=patches)
    return compiled


def write_package(program: torch.export.ExportedProgram, path: str, metadata: dict[str, str]) -> str:
    """AOTInductor's code for the program, with its weights, in a file. Returns the path."""
    from torch._inductor import aoti_compile_and_package

    settings = {"aot_inductor.metadata": metadata}
    written: str = aoti_compile_and_package(program, package_path=path, inductor_configs=settings)
    return written


def load_package(path: str) -> tuple[Callable[..., list[Any]], dict[str, str]]:
    """What runs the code in such a file and gives its outputs in a row, and the file's metadata."""
    from torch._inductor import aoti_load_package
    from torch.utils._pytree import tree_leaves

    compiled = aoti_load_package(path)
    return lambda **inputs: tree_leaves(compiled(**inputs)), compiled.get_metadata()


def free_sizes(arguments: Any) -> Any:
    """For `torch.export`: every size of every tensor may vary, as far as the code allows it."""
    from torch.export import Dim
    from torch.utils._pytree import tree_map

    def free(leaf: Any) -> dict[int, Any] | None:
        if not isinstance(leaf, Tensor):
            return None
        return {dim: Dim.AUTO for dim, size in enumerate(leaf.shape) if size != 1}  # one is a case of its own

    return tree_map(free, arguments)


def guards_of(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """What must be true of the inputs `L` for the program to be right, besides ranges, as Python expressions."""
    return tuple(program._guards_code)


def ranges_of(program: torch.export.ExportedProgram) -> dict[str, tuple[int, int | None]]:
    """{symbol: (least size, greatest size or None)}."""
    return {
        str(symbol): (int(held.lower), int(held.upper) if held.upper.is_Integer else None)
        for symbol, held in program.range_constraints.items()
        if symbol.is_Symbol
    }


def written_spec(program: torch.export.ExportedProgram) -> str:
    """The nesting of the program's outputs as text."""
    from torch.utils._pytree import treespec_dumps

    return treespec_dumps(program.call_spec.out_spec)


def nested(spec: str) -> Callable[[list[Any]], Any]:
    """What gives a row of outputs the nesting that `written_spec` wrote.

    Raises:
        ValueError: `spec` names a class to be imported, as torch's reader does for those of enumerations and of default dicts.
    """
    from torch.utils._pytree import tree_unflatten, treespec_loads

    if _imports(json.loads(spec)[1]):
        raise ValueError("a nesting that names classes to be imported")
    read = treespec_loads(spec)
    if read.is_leaf():
        return operator.itemgetter(0)
    return lambda values: tree_unflatten(values, read)


def _imports(spec: Any) -> bool:
    context = spec["context"]
    with suppress(
        TypeError, ValueError
    ):  # of some kinds of nodes it is no JSON, and of those nothing is decoded
        context = json.loads(context)
    enumerations = '"__enum__"' in json.dumps(context, ensure_ascii=False)
    return (
        spec["type"] == "collections.defaultdict" or enumerations or any(map(_imports, spec["children_spec"]))
    )


@contextmanager
def as_if_traced(inputs: Iterable[Any]) -> Iterator[None]:
    """Inside, `fake_mode()` is that of the fake tensors among `inputs`."""
    from torch._guards import TracingContext, tracing

    mode: Any = next(input.fake_mode for input in inputs if isinstance(input, Tensor))  # type: ignore[attr-defined]
    with tracing(TracingContext(mode)):
        yield


def write_library(graph: GraphModule, path: str, threads: int) -> None:
    """AOTInductor's code for an exported graph whose placeholders have fake tensors, run on that many threads."""
    from torch._inductor import aot_compile
    from torch._inductor.package import package_aoti
    from torch.fx.graph import CodeGen

    graph.graph.set_codegen(CodeGen())  # a row of inputs, a row of outputs
    graph.recompile()
    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    # The code around the kernels is long and runs once per call: optimising it takes most of the time and gains nothing.
    options = {
        "aot_inductor.package": True,
        "aot_inductor.compile_wrapper_opt_level": "O0",
        "cpp.threads": threads,
    }
    with torch.no_grad():
        files: Any = aot_compile(graph, tuple(inputs), options=options)
    package_aoti(path, {"model": files})


def load_library(path: str) -> Callable[..., list[Tensor]]:
    """What runs a library that `write_library` wrote; does not import Inductor."""
    # One runner: calls of several threads wait for each other.
    loader = torch._C._aoti.AOTIModelPackageLoader(path, "model", False, 1, -1)
    return lambda *inputs: loader.boxed_run(list(inputs))


def inductor_folder() -> Path:
    """Where Inductor keeps what it has compiled, some of it as pickles."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())


def inductor_in(folder: Path) -> AbstractContextManager[Any]:
    """Inside, Inductor keeps it in `folder`."""
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    manager: AbstractContextManager[Any] = temporary_cache_dir(str(folder))
    return manager


def modes_are_on() -> bool:
    """Whether somebody watches or replaces the calls of torch or of all modules (tracers, counters, another default device)."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch.nn.modules.module._has_any_global_hook()
    )


def inductor_default(name: str) -> Any:
    """The setting of Inductor's config that holds now.

    Raises:
        AttributeError: there is none of that name.
    """
    from torch._inductor import config

    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def has_compiler() -> bool:
    """Whether Inductor finds a C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def with_pass(uuid: Callable[[], str]) -> dict[str, Any]:
    """A patch that makes `uuid` part of the keys of Inductor's caches, behind the passes that the user may have set."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_custom_graph_passes

    class Marker(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            pass

        def uuid(self) -> str:
            return uuid()

    return {
        "post_grad_custom_pre_pass": [*get_custom_graph_passes(config.post_grad_custom_pre_pass), Marker()]
    }


@contextmanager
def without_floats(scalars: Iterable[torch.SymFloat]) -> Iterator[None]:
    """Inside, compilation does not start over because these floats are no inputs of the graph any more.

    Where a symbolic float did not become a tensor's value, Inductor has Dynamo trace the model once more with that float as a
    constant. Those that our graph dropped, or guarded, need no second trace.
    """
    from torch._dynamo.symbolic_convert import TensorifyState

    # Names that torch itself adds meanwhile must outlive this: the next trace reads them.
    ours = {str(scalar.node._expr) for scalar in scalars} - TensorifyState.force_specializations
    TensorifyState.force_specializations.update(ours)
    try:
        yield
    finally:
        TensorifyState.force_specializations.difference_update(ours)


def is_of_module(number: torch.SymFloat) -> bool:
    """Whether Dynamo found this float in a module, and not among the arguments of a call."""
    sources = number.node.shape_env.var_to_sources.get(number.node.expr, ())
    return any(source.guard_source.is_unspecialized_nn_module() for source in sources)


def plain_inductor(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Inductor as torch documents it for graphs of one's own."""
    from torch import _inductor

    compiled: Any = _inductor.compile(graph, list(inputs))
    return compiled


def fake_inputs(inputs: Sequence[Any]) -> list[Any]:
    """Dynamo's example inputs as fake tensors, with the symbolic sizes that Dynamo gave them."""
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
    """The mode that the fake inputs of the graph being compiled belong to."""
    from torch._guards import TracingContext

    return TracingContext.get().fake_mode


def tracing(mode: Any) -> AbstractContextManager[Any]:
    """Where graphs of fake tensors are traced: without gradients, and new tensors are fake."""
    from torch._dispatch.python import enable_python_dispatcher

    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(mode)
    stack.enter_context(enable_python_dispatcher())
    return stack


def trace_aten(graph: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """`graph` in ATen ops, none of them decomposed: linear, layer_norm, gelu and scaled_dot_product_attention stay whole."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(graph, decomposition_table={}, pre_dispatch=True)(*inputs)


def is_plain_tensor(value: Tensor) -> bool:
    """No subclass that unpacks itself while it is traced, and not of another device."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return (
        value.device.type == "cpu"
        and value.layout is torch.strided
        and not is_traceable_wrapper_subclass(value)
    )


def is_static_input(placeholder: torch.fx.Node) -> bool:
    """Whether Dynamo found this input of its graph in a module."""
    return bool((placeholder.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type"))


def is_higher_order(target: object) -> bool:
    """Whether the target of a node takes graphs as arguments."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def is_transform(target: object) -> bool:
    """Whether the target of a node begins or ends what torch.func does to a function: values between have hidden dimensions."""
    return str(getattr(target, "__module__", "")).startswith("torch._functorch")


def is_always(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on symbolic sizes is known to hold for all inputs; adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def size_seen(size: int | torch.SymInt) -> int:
    """The size in the call that is compiled for, 0 where it depends on values; adds no guard."""
    from torch.fx.experimental import symbolic_shapes

    # Called size_hint before torch 2.12.
    hint: Any = getattr(symbolic_shapes, "optimization_hint", None) or getattr(
        symbolic_shapes, "size_hint", None
    )
    return int(hint(size, fallback=0))


def storage_of(value: Tensor) -> int:
    """Equal for tensors, fake ones too, that share their memory."""
    return int(value.untyped_storage()._cdata)
