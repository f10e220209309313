"""The backend around the passes: who finds it, what it leaves as it was, what it refuses, and what it does without a compiler."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config

from hf_cpu_accel.compiler import report, torch_private
from hf_cpu_accel.compiler.backend import hf_cpu_accel
from hf_cpu_accel.compiler.options import Options
from hf_cpu_accel.compiler.torch_private import versions
from tests.compiler.conftest import only_graph


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).eval()


@torch.no_grad()
def check(model: Callable[..., Tensor], reference: nn.Module, *inputs: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(model(*inputs), reference(*inputs), atol=atol, rtol=1e-4)


def test_inductor_afterwards_is_as_before(compiled: Callable[..., Any]) -> None:
    before = copy.deepcopy(inductor_config.get_config_copy())
    model, input = mlp(), torch.randn(3, 16)

    def code_of_inductor() -> str:
        torch._dynamo.reset()
        with torch.no_grad():
            _, (code, *_) = torch._inductor.utils.run_and_get_code(torch.compile(model, dynamic=True), input)
        return "\n".join(line for line in code.splitlines() if not line.startswith("#"))

    with inductor_config.patch(force_disable_caches=True):
        untouched = code_of_inductor()
        check(compiled(model), model, input)
        assert code_of_inductor() == untouched
    assert "hf_cpu_accel" not in untouched
    assert inductor_config.get_config_copy() == before


def test_passes_of_the_user_stay(compiled: Callable[..., Any]) -> None:
    seen = []
    with inductor_config.patch(
        post_grad_custom_pre_pass=lambda graph: seen.append(graph), force_disable_caches=True
    ):
        model = mlp()
        check(compiled(model), model, torch.randn(3, 16))
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("options", "mode", "message"),
    [
        (
            {"dtypes": "int8"},
            None,
            "options: 'dtypes' is unknown; expected 'dtype', 'skip_passes', 'inductor'",
        ),
        ({"dtype": "int3"}, None, "options: dtype='int3': expected None or one of 'float32'"),
        (
            {"skip_passes": ("layer",)},
            None,
            "options: skip_passes contains 'layer': expected names of passes: 'simplify'",
        ),
        ({"inductor": {"fast": True}}, None, "options: inductor: 'fast' is not a setting"),
        ({"inductor": {"freezing": True}}, None, "freezing is not supported"),
        (None, "fastest", "mode='fastest': expected one of 'default', 'reduce-overhead'"),
    ],
)
def test_what_is_not_accepted_says_so(options: dict[str, Any] | None, mode: str | None, message: str) -> None:
    with pytest.raises(ValueError, match="^" + message.replace("'", "['\"]") if options is None else message):
        Options.of(options, mode)


@pytest.mark.parametrize("options", [{"skip_passes": "linear"}, {"inductor": 3}, {"inductor": {3: 4}}])
def test_wrong_types_say_so(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"^options: "):
        Options.of(options, None)


def test_a_bad_option_reaches_the_user(compiled: Callable[..., Any]) -> None:
    with pytest.raises(Exception, match="dtype='int3'"), torch.no_grad():
        compiled(mlp(), dtype="int3")(torch.randn(3, 16))


def test_modes_are_accepted_and_change_nothing() -> None:
    assert Options.of(None, "reduce-overhead") == Options.of(None, "max-autotune") == Options()
    assert Options.of({"inductor": {"cpp_wrapper": True}}, "max-autotune").inductor == {"cpp_wrapper": True}


def test_training_is_left_to_inductor(compiled: Callable[..., Any]) -> None:
    model, input = mlp(), torch.randn(3, 16)
    expected = torch.autograd.grad(model(input).square().sum(), list(model.parameters()))
    output = compiled(model)(input)
    gradients = torch.autograd.grad(output.square().sum(), list(model.parameters()))
    torch.testing.assert_close(gradients, expected)
    assert only_graph().left == "gradients are needed"
    assert not only_graph().rewrites
    with torch.no_grad():
        check(compiled(model), model, input)
    assert report.graphs()[-1].ours


def test_autocast_is_left_to_inductor(compiled: Callable[..., Any]) -> None:
    model, input = mlp(), torch.randn(3, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        output = compiled(model)(input)
        assert output.dtype is torch.bfloat16
        torch.testing.assert_close(output, model(input))
    assert "autocast" in str(only_graph().left)


def test_where_all_of_torch_freezes_inductor_compiles(compiled: Callable[..., Any]) -> None:
    model, input = mlp(), torch.randn(3, 16)
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        torch.testing.assert_close(compiled(model)(input), model(input), atol=1e-5, rtol=1e-4)
    assert "freezing is on" in str(only_graph().left)


@pytest.mark.usefixtures("no_codegen")
def test_without_a_compiler_our_ops_serve(
    compiled: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    report.say.cache_clear()
    model, other = mlp(), mlp()
    with caplog.at_level(logging.WARNING):
        check(compiled(model), model, torch.randn(3, 16))
        check(compiled(other), other, torch.randn(3, 16))
    assert [record.getMessage() for record in caplog.records] == [
        "hf_cpu_accel: no C++ compiler found (install g++ or set CXX): fused ops run, and PyTorch (eager) runs the "
        "other ops"
    ]
    assert all(graph.ours for graph in report.graphs())


def test_has_compiler_looks_where_inductor_looks() -> None:
    with inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert not torch_private.has_compiler()
    assert torch_private.has_compiler()


def test_an_unknown_torch_gets_plain_inductor(
    compiled: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    report.say.cache_clear()
    torch_private.problem.cache_clear()
    monkeypatch.setattr(versions, "VERSIONS", {"2.1": versions.Names()})
    model = mlp()
    try:
        with caplog.at_level(logging.WARNING):
            check(compiled(model), model, torch.randn(3, 16))
            check(compiled(model), model, torch.randn(5, 16))
    finally:
        torch_private.problem.cache_clear()
    (record,) = caplog.records
    assert (
        "is not among the versions tested for compiling (2.1); Inductor compiles the graph"
        in record.getMessage()
    )
    assert not only_graph().ours
    assert only_graph().left


@pytest.mark.usefixtures("no_codegen")
def test_inference_mode_and_other_threads(compiled: Callable[..., Any]) -> None:
    model, input = mlp(), torch.randn(3, 16)
    fast = compiled(model)
    expected = model(input)
    with torch.inference_mode():
        torch.testing.assert_close(fast(input), expected, atol=1e-5, rtol=1e-4)
    torch.set_num_threads(2)
    check(fast, model, input)


def test_the_function_is_the_backend() -> None:
    assert hf_cpu_accel.__name__ == "hf_cpu_accel"
