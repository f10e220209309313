"""The search: the fastest dtype where it holds, a wider one for what cannot bear it, and a model that is as before if not."""

import pytest
import torch

from hf_cpu_accel import CPUAccelConfig, accelerate_for_cpu, accelerated, explain, restore
from hf_cpu_accel.accuracy import choose as search
from hf_cpu_accel.check import DISAGREES, Comparison
from hf_cpu_accel.patching.acceleration import accelerated_parts
from hf_cpu_accel.tolerance import PACKED
from tests.accuracy.models import BAD, bert, llama, token_ids


def hidden(model, ids):
    with torch.no_grad():
        return model(ids)[0]


def least_cosine(now, before):
    return torch.nn.functional.cosine_similarity(now.double(), before.double(), dim=-1).min().item()


def choice_of(model):
    (choice,) = explain(model).choices
    return choice


def test_the_fastest_dtype_is_chosen_if_it_is_accurate():
    model, ids = bert(), token_ids()[0]["input_ids"]
    before = hidden(model, ids)
    assert accelerate_for_cpu(model, accuracy=0.99, examples=token_ids()) is model
    choice = choice_of(model)
    assert (choice.dtype, choice.dtypes, choice.tries, choice.measure) == ("int8", (), 1, "cosine")
    assert choice.layers == {"float32": 1, "int8": 12}  # the pooler, and four for each layer
    # The examples are those of this call, so this is what was measured.
    assert 0.99 <= choice.measured <= least_cosine(hidden(model, ids), before) + 1e-9
    assert "accuracy=0.99: 1 in float32, 12 in int8; least cosine" in str(explain(model))
    restore(model)
    assert torch.equal(hidden(model, ids), before)


def test_layers_that_need_more_bits_are_found():
    model = bert(bad=True)
    before = [hidden(model, call["input_ids"]) for call in token_ids()]
    with accelerated(model, dtype="int8", verify=True):
        worst = min(
            least_cosine(hidden(model, c["input_ids"]), b) for c, b in zip(token_ids(), before, strict=True)
        )
    assert worst < 0.99  # or there is nothing to be found
    accelerate_for_cpu(model, accuracy=0.99, examples=token_ids())
    choice = choice_of(model)
    assert choice.holds
    assert choice.dtype == "int8"
    assert [path for path, _ in choice.dtypes] == [BAD]
    assert choice.dtypes[0][1] in ("bfloat16", "float32")
    now = min(
        least_cosine(hidden(model, c["input_ids"]), b) for c, b in zip(token_ids(), before, strict=True)
    )
    assert now >= choice.measured - 1e-6  # which counts the pooler's output, too
    items = {item.name: item.dtype for item in explain(model).replaced}
    assert items["encoder.layer.1.output"] == choice.dtypes[0][1]
    assert items["encoder.layer.1"] in ("bfloat16 + int8", "float32 + int8")  # and is fused with it
    assert items["encoder.layer.0.output"] == items["encoder.layer.1.intermediate"] == "int8"


def test_choices_are_deterministic():
    choices = []
    for _ in range(2):
        model = bert(bad=True)
        accelerate_for_cpu(model, accuracy=0.995, examples=token_ids(1))
        choices.append(choice_of(model))
    assert choices[0] == choices[1]


def test_requested_dtypes_stay_unchanged():
    model = bert(bad=True)
    given = {BAD: "int8-weight", "encoder.layer.0": "bfloat16"}
    with pytest.warns(RuntimeWarning, match=r"accuracy=0.999999999999999 is not reached"):
        accelerate_for_cpu(model, accuracy=1 - 1e-15, dtypes=given, examples=token_ids())
    items = {item.name: item.dtype for item in explain(model).replaced}
    assert items["encoder.layer.1.output"] == "int8-weight"
    assert items["encoder.layer.0.output"] == "bfloat16"
    assert items["encoder.layer.2.output"] == "float32"


def test_unreachable_accuracies_end_in_float32_with_a_warning():
    model = bert()
    with pytest.warns(RuntimeWarning, match="is not reached") as caught:
        accelerate_for_cpu(model, accuracy=1 - 1e-16 * 2, examples=token_ids(1))
    assert [w.filename for w in caught if w.category is RuntimeWarning] == [__file__]
    choice = choice_of(model)
    assert not choice.holds
    assert (choice.dtype, explain(model).dtype) == ("float32", "float32")
    assert choice.measured > 1 - 1e-9


def test_layers_that_fail_in_8_bits_get_another_dtype(monkeypatch):
    """Verification on random numbers leaves it as it is, which holds any budget and gains nothing."""
    model = bert()
    with torch.no_grad():  # so large a range within rows of the weight that no probe agrees
        model.encoder.layer[2].intermediate.dense.weight[:, 0] *= 0
    real = Comparison.reason

    def refuses(comparison, bound):
        small = bound > PACKED.bfloat16 and comparison.pairs[0][0].shape[-1] == 256
        return f"{DISAGREES} 1.0e+00" if small else real(comparison, bound)

    monkeypatch.setattr(Comparison, "reason", refuses)
    accelerate_for_cpu(model, accuracy=0.99, examples=token_ids(2))
    choice = choice_of(model)
    assert choice.holds
    assert {path for path, _ in choice.dtypes} == {f"encoder.layer.{n}.intermediate.dense" for n in range(3)}
    assert not any("differs" in item.reason for item in explain(model).left)


def test_perplexity_of_a_language_model():
    model, examples = llama(), token_ids(3, 40)

    def loss():
        with torch.no_grad():
            losses = [
                model(**e, labels=e["input_ids"], use_cache=False).loss.double().item() for e in examples
            ]
        return sum(losses) / len(losses)  # all are of one length

    before = loss()
    accelerate_for_cpu(model, accuracy=0.99, examples=examples)
    choice = choice_of(model)
    assert choice.measure == "perplexity"
    assert choice.holds
    assert choice.measured == pytest.approx(torch.tensor(before - loss()).exp().item(), abs=1e-5)
    assert "perplexity" in str(choice)


def fails_on(number, monkeypatch, error):
    """The `number`-th forward of any BertModel raises."""
    from transformers import BertModel

    real, count = BertModel.forward, iter(range(10_000))

    def forward(self, *args, **kwargs):
        if next(count) == number:
            raise error
        return real(self, *args, **kwargs)

    monkeypatch.setattr(BertModel, "forward", forward)


@pytest.mark.parametrize(
    ("number", "error"),
    [(0, RuntimeError("no")), (1, KeyboardInterrupt()), (2, RuntimeError("no")), (7, KeyboardInterrupt())],
)
def test_after_an_exception_the_model_is_unchanged(number, error, monkeypatch):
    model, ids = bert(bad=True), token_ids(2)
    before, parameters = hidden(model, ids[0]["input_ids"]), list(model.parameters())
    training = [parameter.requires_grad for parameter in parameters]
    with monkeypatch.context() as patched:
        fails_on(number, patched, error)
        with pytest.raises((RuntimeError, ValueError, KeyboardInterrupt)):
            accelerate_for_cpu(model, accuracy=0.999, examples=ids, verify=False)
    assert not accelerated_parts(model)
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    assert [parameter.requires_grad for parameter in parameters] == training
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(hidden(model, ids[0]["input_ids"]), before)


@pytest.mark.parametrize("originals", ["memory", "drop"])
def test_originals_may_be_stored_elsewhere(originals):
    model = bert(bad=True)
    ids = token_ids(1)[0]["input_ids"]
    before = hidden(model, ids)
    accelerate_for_cpu(model, accuracy=0.99, examples=token_ids(1), originals=originals)
    assert least_cosine(hidden(model, ids), before) >= 0.99
    if originals == "drop":
        with pytest.raises(RuntimeError, match="drop"):
            restore(model)
    else:
        assert torch.equal(hidden(restore(model), ids), before)


def test_a_second_call_searches_only_with_examples(monkeypatch):
    model = bert()
    accelerate_for_cpu(model, accuracy=0.99, examples=token_ids(1))
    calls = []
    monkeypatch.setattr(search._Search, "run", lambda self: calls.append(1) or 1 / 0)
    accelerate_for_cpu(model, accuracy=0.99)
    accelerate_for_cpu(model, CPUAccelConfig(accuracy=0.99))
    assert not calls
    with pytest.raises(ZeroDivisionError):
        accelerate_for_cpu(model, accuracy=0.99, examples=token_ids(2))


def test_the_random_state_of_the_user_is_unchanged():
    model = bert()
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    accelerate_for_cpu(model, accuracy=0.99)
    assert torch.equal(torch.randn(3), expected)
