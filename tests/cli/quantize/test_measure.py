"""The loss of each linear: the estimate against quantizing it alone, and the resulting mixes."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaForCausalLM

from hf_cpu_accel import accelerated
from hf_cpu_accel.cli.quantize.measure import (
    LinearLosses,
    Option,
    ReferenceOutputs,
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
    """Return a tiny model: "llama" with logits, "bert" without."""
    result = model(name)
    if name == "llama":
        inner, result = result, LlamaForCausalLM(result.config)
        result.model = inner
    return result.eval().requires_grad_(False)


def packed_as(original: Any, dtype: str) -> dict[str, PackedWeight]:
    with accelerated(original, dtype=dtype):
        return packed_linears(original)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_the_estimate_agrees_with_quantizing_one_linear(name: str) -> None:
    original = tiny(name)
    calls = calibration_examples([{"input_ids": ids(seed, rows=8, length=16)} for seed in range(8)], original)
    packed = {dtype: packed_as(original, dtype) for dtype in ("int4", "int8")}
    progress: list[int] = []
    losses = measure(original, calls, packed, lambda: progress.append(1))
    assert len(progress) == steps(calls)
    reference = ReferenceOutputs(original, calls)
    for losses_of_linear in losses[::3]:
        path, options = losses_of_linear.path, losses_of_linear.options
        module = original.get_submodule(path)
        weight = module.weight.detach().clone()
        for dtype in ("int4", "int8"):
            option = options[dtype]
            assert option.form == packed[dtype][path].dtype == dtype
            module.weight.copy_(unpack_linear(packed[dtype][path]))
            alone = reference.loss(original)
            module.weight.copy_(weight)
            if dtype == "int4":  # here the rounding of activations matters little
                assert 0.5 * alone < option.loss < 2 * alone
        assert 5 * options["int8"].loss < options["int4"].loss
        assert 3 * options["int8"].error < options["int4"].error < 0.2
    assert reference.loss(original) == pytest.approx(0, abs=1e-6)
    assert not any(module._forward_hooks for module in original.modules())


def test_errors_are_those_of_the_op() -> None:
    original = tiny("bert")
    calls = calibration_examples([{"input_ids": ids(0)}], original)
    packed = packed_as(original, "int4")
    inputs = {}
    path = "encoder.layer.0.output.dense"
    handle = original.get_submodule(path).register_forward_hook(
        lambda module, args, output: inputs.update(x=args[0])
    )
    original(ids(0))
    handle.remove()
    expected = inputs["x"] @ original.get_submodule(path).weight.T
    error = (linear(inputs["x"], packed[path]) - expected).norm() / expected.norm()
    (measured,) = (item for item in measure(original, calls, {"int4": packed}) if item.path == path)
    assert measured.options["int4"].error == pytest.approx(error.item(), rel=1e-3)


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
