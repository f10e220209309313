"""What each linear loses: the estimate against quantizing it alone, and the mixes that follow."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaForCausalLM

from hf_cpu_accel import accelerated
from hf_cpu_accel.cli.quantize.measure import (
    Answers,
    LinearLosses,
    Option,
    measure,
    packed_linears,
    steps,
)
from hf_cpu_accel.cli.quantize.mix import mixes, proposal
from hf_cpu_accel.ops.linear import linear
from hf_cpu_accel.packing.linear import PackedWeight, unpack_linear
from hf_cpu_accel.rewrite.core.calibration import calibration_examples
from tests.rewrite.calibration.models import ids, model


def tiny(name: str) -> Any:
    """With logits, or without."""
    whole = model(name)
    if name == "llama":
        inner, whole = whole, LlamaForCausalLM(whole.config)
        whole.model = inner
    return whole.eval().requires_grad_(False)


def packed_as(given: Any, dtype: str) -> dict[str, PackedWeight]:
    with accelerated(given, dtype=dtype):
        return packed_linears(given)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_the_estimate_is_what_quantizing_one_linear_does(name: str) -> None:
    given = tiny(name)
    calls = calibration_examples([{"input_ids": ids(seed, rows=8, length=16)} for seed in range(8)], given)
    packed = {dtype: packed_as(given, dtype) for dtype in ("int4", "int8")}
    taken: list[int] = []
    losses = measure(given, calls, packed, lambda: taken.append(1))
    assert len(taken) == steps(calls)
    answers = Answers(given, calls)
    for found in losses[::3]:
        module = given.get_submodule(found.path)
        weight = module.weight.detach().clone()
        for dtype in ("int4", "int8"):
            option = found.options[dtype]
            assert option.form == packed[dtype][found.path].dtype == dtype
            module.weight.copy_(unpack_linear(packed[dtype][found.path]))
            alone = answers.loss(given)
            module.weight.copy_(weight)
            if dtype == "int4":  # the rounding of activations counts little there
                assert 0.5 * alone < option.loss < 2 * alone
        assert 5 * found.options["int8"].loss < found.options["int4"].loss
        assert 3 * found.options["int8"].error < found.options["int4"].error < 0.2
    assert answers.loss(given) == pytest.approx(0, abs=1e-6)
    assert not any(module._forward_hooks for module in given.modules())


def test_errors_are_those_of_the_op() -> None:
    given = tiny("bert")
    calls = calibration_examples([{"input_ids": ids(0)}], given)
    packed = packed_as(given, "int4")
    seen = {}
    path = "encoder.layer.0.output.dense"
    handle = given.get_submodule(path).register_forward_hook(
        lambda module, args, output: seen.update(x=args[0])
    )
    given(ids(0))
    handle.remove()
    expected = seen["x"] @ given.get_submodule(path).weight.T
    error = (linear(seen["x"], packed[path]) - expected).norm() / expected.norm()
    (found,) = (some for some in measure(given, calls, {"int4": packed}) if some.path == path)
    assert found.options["int4"].error == pytest.approx(error.item(), rel=1e-3)


def losses(path: str, *options: tuple[str, int, float]) -> LinearLosses:
    return LinearLosses(
        path, {dtype: Option(dtype, dtype, nbytes, 0.0, loss) for dtype, nbytes, loss in options}
    )


def test_bytes_go_where_they_save_most() -> None:
    some = [
        losses("a", ("int4", 10, 8.0), ("int8", 20, 1.0), ("bfloat16", 40, 0.0)),  # 0.7 a byte, then 0.05
        losses("b", ("int4", 10, 2.0), ("int8", 20, 1.0), ("bfloat16", 40, 0.0)),  # 0.1, then 0.05
        losses(
            "c", ("int4", 10, 4.0), ("int8", 20, 3.9), ("bfloat16", 40, 0.0)
        ),  # int8 is not worth it: 0.133
        losses("d", ("int4", 10, 1.0), ("int8", 20, 1.5), ("bfloat16", 40, 1.2)),  # finer is no better
    ]
    found = mixes(some)
    assert [(mix.nbytes, round(mix.loss, 2)) for mix in found[:4]] == [
        (40, 15.0),
        (50, 8.0),
        (80, 4.0),
        (90, 3.0),
    ]
    assert found[-1].dtypes == {"a": "bfloat16", "b": "bfloat16", "c": "bfloat16", "d": "int4"}
    assert proposal(found, nbytes=79) is found[1]
    assert proposal(found, loss=4.0) is found[2]
    assert proposal(found, nbytes=39) is None
    assert proposal(found, loss=0.5) is None
