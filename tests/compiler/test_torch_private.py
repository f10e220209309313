"""What each name of `compiler/torch_private` does with this torch: the test that fails names what torch has changed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel.compiler import torch_private as private
from hf_cpu_accel.compiler.torch_private import versions


def test_each_name_has_a_contract() -> None:
    contracts = "\n".join(name for name in globals() if name.startswith("test_"))
    assert [name for name in private.__all__ if name not in contracts] == []


def test_problem_and_unknown_version() -> None:
    assert private.unknown_version() is None
    assert private.problem() is None
    assert versions.VERSIONS[".".join(torch.__version__.split(".")[:2])] == versions.names()


def recorded(function: Callable[..., Any], *inputs: Any) -> dict[str, Any]:
    """What `look`, given to a backend of Dynamo's, found in the one graph of a call: sizes are symbols."""
    found: dict[str, Any] = {}

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        found["graph"], found["examples"] = graph, examples
        found["fakes"], found["mode"] = private.fake_inputs(examples), private.fake_mode()
        sizes = [one for one in examples if isinstance(one, torch.SymInt)]
        found["seen"] = [private.size_seen(size) for size in sizes]
        found["always"] = [(private.is_always(size > 1), private.is_always(size > 5)) for size in sizes]
        found["guards"] = len(sizes and sizes[0].node.shape_env.guards)
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=True, fullgraph=True)(*inputs)
    return found


def test_fake_inputs_fake_mode_size_seen_is_always_and_is_static_input() -> None:
    linear = nn.Linear(4, 4)
    found = recorded(lambda x: linear(x).relu(), torch.randn(7, 4))
    placeholders = list(found["graph"].graph.find_nodes(op="placeholder"))
    assert sum(map(private.is_static_input, placeholders)) == 2  # weight and bias
    assert len(found["fakes"]) == len(found["examples"])
    tensors = [fake for fake in found["fakes"] if isinstance(fake, Tensor)]
    assert all(fake.fake_mode is found["mode"] for fake in tensors)
    assert any(isinstance(fake.shape[0], torch.SymInt) for fake in tensors)
    assert 7 in found["seen"]
    assert found["always"][found["seen"].index(7)] == (True, False)


def test_trace_aten_and_tracing_keep_whole_ops() -> None:
    found = recorded(lambda x: nn.functional.gelu(x) * 2, torch.randn(3, 4))
    with private.tracing(found["mode"]):
        aten = private.trace_aten(found["graph"], found["fakes"])
    assert torch.ops.aten.gelu.default in {node.target for node in aten.graph.nodes}


def test_counters_count_graphs() -> None:
    private.counters("stats").clear()
    recorded(torch.sin, torch.randn(3))
    assert private.counters("stats")["unique_graphs"] == 1


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.37

    def forward(self, x: Tensor, factor: float) -> Tensor:
        return x * self.scale * factor


def test_is_of_module_and_without_floats() -> None:
    from torch._dynamo.symbolic_convert import TensorifyState

    found = recorded(Scaled(), torch.randn(3), 0.21)
    floats = [
        value
        for node in found["graph"].graph.nodes
        if isinstance(value := node.meta.get("example_value"), torch.SymFloat)
    ]
    own = {private.is_of_module(value): value for value in floats}
    assert set(own) == {True, False}
    name = str(own[True].node._expr)
    with private.without_floats([own[True]]):
        assert name in TensorifyState.force_specializations
    assert name not in TensorifyState.force_specializations


def test_sym_sqrt_is_higher_order_and_is_transform() -> None:
    assert private.sym_sqrt(9.0) == 3.0
    assert private.is_higher_order(torch.ops.higher_order.cond)
    assert not private.is_higher_order(torch.ops.aten.add.Tensor)
    targets = {
        node.target for node in recorded(torch.vmap(torch.sin), torch.randn(3, 2))["graph"].graph.nodes
    }
    assert any(map(private.is_transform, targets))
    assert not private.is_transform(torch.sin)


def test_storage_of_and_is_plain_tensor() -> None:
    x = torch.randn(4, 4)
    assert private.storage_of(x) == private.storage_of(x[1:]) != private.storage_of(x.clone())
    assert private.is_plain_tensor(x)
    assert not private.is_plain_tensor(x.to_sparse())


def test_inductor_default() -> None:
    for setting in ("cpp.threads", "cpp_wrapper", "freezing", "aot_inductor.compile_wrapper_opt_level"):
        private.inductor_default(setting)
    with pytest.raises(AttributeError):
        private.inductor_default("cpp.no_such_setting")


def test_with_pass_is_in_the_keys_and_leaves_other_passes_be() -> None:
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Theirs(CustomGraphPass):
        seen = 0

        def __call__(self, graph: torch.fx.Graph) -> None:
            self.seen += 1

        def uuid(self) -> str:
            return "theirs"

    theirs = Theirs()
    with config.patch(post_grad_custom_pre_pass=theirs):
        patched = private.with_pass(lambda: "ours")["post_grad_custom_pre_pass"]
    passes = patched if isinstance(patched, list) else [patched]
    for each in passes:
        each(torch.fx.Graph())
    assert theirs.seen == 1
    assert "theirs" in str([each.uuid() for each in passes])
    assert "ours" in str([each.uuid() for each in passes])


def test_has_compiler_compile_with_inductor_and_plain_inductor() -> None:
    assert private.has_compiler()
    x = torch.randn(5, 3)
    for compile in (
        lambda graph, inputs: private.compile_with_inductor(graph, inputs, private.with_pass(lambda: "ours")),
        private.plain_inductor,
    ):
        torch._dynamo.reset()
        with torch.no_grad():
            fast = torch.compile(lambda x: (x.sin() + 1).relu(), backend=compile, dynamic=True)
            torch.testing.assert_close(fast(x), (x.sin() + 1).relu())


def test_write_package_and_load_package(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() * 2

    x = torch.randn(5, 3)
    program = torch.export.export(Twice(), (), {"x": x})
    with torch.no_grad():
        path = str(tmp_path / "package.pt2")
        private.write_package(program, path, {"made": "here"})
        run, metadata = private.load_package(path)
        torch.testing.assert_close(run(x=x)[0], x.sin() * 2)
        assert metadata["made"] == "here"


def test_templates_register_what_products_need() -> None:
    """Whether generated code around our tiles computes what it should is in test_lowerings.py."""
    from hf_cpu_accel.compiler import lowerings
    from hf_cpu_accel.compiler.torch_private import templates

    with lowerings.in_use():
        assert templates._ours.get()
        if "hf_cpu_accel.compiler.lowerings.products" in sys.modules:
            from torch._inductor import lowering

            assert torch.ops.hf_cpu_accel.linear.default in lowering.lowerings
    assert not templates._ours.get()
