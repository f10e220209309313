"""Arguments and outputs of models with float16 weights."""

from collections import UserDict, namedtuple
from types import SimpleNamespace

import torch
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from hf_cpu_accel.patching.float16_values import to_float16, to_float32

HALF, INTEGERS = torch.randn(3).half(), torch.arange(3)
Pair = namedtuple("Pair", "first second")


def test_float16_alone_is_widened_in_every_container():
    output = BaseModelOutput(last_hidden_state=HALF, hidden_states=(HALF, HALF))
    given = {"a": [HALF, INTEGERS], "b": Pair(HALF, "text"), "c": UserDict(x=HALF), "d": output}
    made = to_float32(given)
    assert torch.equal(made["a"][0], HALF.float())
    assert made["a"][1] is INTEGERS
    assert type(made["b"]) is Pair
    assert made["b"].first.dtype is torch.float32
    assert type(made["c"]) is UserDict
    assert made["c"]["x"].dtype is torch.float32
    assert type(made["d"]) is BaseModelOutput
    assert made["d"].last_hidden_state.dtype is torch.float32
    assert given["a"][0] is HALF
    assert given["c"]["x"] is HALF
    assert output.last_hidden_state is HALF


def test_what_is_one_tensor_in_two_places_stays_one():
    state = torch.randn(3)
    made = to_float16(BaseModelOutput(last_hidden_state=state, hidden_states=(state,)))
    assert made.last_hidden_state is made.hidden_states[0]
    assert made["last_hidden_state"].dtype is torch.float16


def test_what_holds_nothing_to_convert_is_handed_on():
    values = {"a": [INTEGERS, None], "b": (HALF.double(), HALF.bfloat16()), "cache": DynamicCache()}
    assert to_float32(values) is values
    assert to_float16(values) is values


def test_names_that_are_kept():
    made = to_float16({"loss": torch.ones(()), "logits": torch.ones(2)}, ("loss",))
    assert made["loss"].dtype is torch.float32
    assert made["logits"].dtype is torch.float16


def test_finite_numbers_stay_finite():
    values = torch.tensor([1e6, -1e6, float("inf"), -float("inf"), float("nan"), 65504.0, 65519.0, 6e-8])
    expected = torch.tensor(
        [65504.0, -65504.0, float("inf"), -float("inf"), float("nan"), 65504, 65504, 6e-8]
    )
    torch.testing.assert_close(to_float16(values), expected.half(), rtol=0, atol=0, equal_nan=True)


def test_objects_of_tensors_are_values_and_others_are_not():
    record = SimpleNamespace(mean=torch.ones(2), deterministic=False)
    made = to_float16({"latents": record})["latents"]
    assert made.mean.dtype is torch.float16
    assert record.mean.dtype is torch.float32
    other = SimpleNamespace(mean=torch.ones(2), layers=[])
    assert to_float16({"cache": other})["cache"] is other
