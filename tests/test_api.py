import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import hf_cpu_accel
from hf_cpu_accel import CPUAccelConfig, accelerate_for_cpu, accelerated, explain, extension, restore
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.registry import STAGES, Stage


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))
        self.out = nn.Linear(64, 32)

    def forward(self, x):
        return self.out(torch.tanh(self.query(x) + self.key(x)) * self.value(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), nn.Linear(32, 64)

    def forward(self, x):
        return self.second(self.first(x))


@pytest.fixture
def model():
    return Model().eval()


@pytest.fixture
def input():
    return torch.randn(2, 5, 64)


def test_accelerate_returns_the_same_object_and_restore_too(model, input):
    before = model(input)
    assert accelerate_for_cpu(model, dtype="float32") is model
    assert isinstance(model.second, PackedLinear)
    torch.testing.assert_close(model(input), before, rtol=1e-4, atol=1e-5)
    assert restore(model) is model
    assert torch.equal(model(input), before)


def test_twice_with_the_same_settings_does_nothing(model):
    accelerate_for_cpu(model, dtype="int8", originals="memory")
    modules = list(model.modules())
    accelerate_for_cpu(model, CPUAccelConfig("int8", originals="memory"))
    assert all(now is then for now, then in zip(model.modules(), modules, strict=True))


def test_other_settings_create_a_new_plan(model, input):
    before = model(input)
    accelerate_for_cpu(model, dtype="int8")
    accelerate_for_cpu(model, dtype="float32", skip_modules=["second"])
    plan = explain(model)
    assert plan.dtype == "float32"
    assert [item.name for item in plan.left] == ["second"]
    assert torch.equal(restore(model)(input), before)


def test_restore_leaves_other_models_unchanged(model):
    modules = list(model.modules())
    assert restore(model) is model
    assert list(model.modules()) == modules


def test_accelerated_restores_the_earlier_state(model, input):
    before = model(input)
    with accelerated(model, dtype="int8") as inside:
        assert inside is model
        assert explain(model).dtype == "int8"
    assert torch.equal(model(input), before)
    accelerate_for_cpu(model, dtype="float32")
    with accelerated(model, dtype="int8"):
        assert explain(model).dtype == "int8"
    assert explain(model).dtype == "float32"


def test_accelerated_restores_after_an_exception(model):
    with pytest.raises(KeyError), accelerated(model, dtype="int8"):
        raise KeyError
    assert explain(model).items == ()


def test_explain_names_modules_settings_and_kernels(model):
    assert "nothing is accelerated" in str(explain(model))
    accelerate_for_cpu(model, dtype="int8", threads=1)
    plan = explain(model)
    assert plan.counts() == {"merged projections": 4, "linear": 1}
    assert {item.name for item in plan.replaced} == {
        "first.query",
        "first.key",
        "first.value",
        "first.out",
        "second",
    }
    assert plan.kernels == ("native" if extension.status().loaded else "reference")
    assert plan.threads == 1
    assert "threads=1" in plan.thread_reason
    # 8-bit weights and two float32 numbers per output feature.
    sizes = {item.name: item.packed_bytes for item in plan.replaced}
    assert sizes["first.query"] == 64 * 64 + 2 * 4 * 64
    assert plan.to_dict()["config"]["dtype"] == "int8"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "fp32"}, ValueError, "dtype='fp32' is unknown, accepted"),
        ({"dtype": "int8-static"}, ValueError, "needs calibration="),
        (
            {"compile": "later"},
            ValueError,
            "compile='later' is unknown, accepted: 'auto', 'off', 'now', 'background'",
        ),
        ({"verfy": False}, TypeError, "unknown option 'verfy', accepted: dtype"),
        ({"config": "int8"}, TypeError, "config is a str, expected a CPUAccelConfig"),
        ({"threads": -1}, ValueError, "threads=-1"),
    ],
)
def test_bad_settings_are_rejected_before_any_change(model, options, error, message):
    modules = list(model.modules())
    with pytest.raises(error, match=message):
        accelerate_for_cpu(model, **options)
    assert list(model.modules()) == modules


def test_keywords_override_the_config(model):
    accelerate_for_cpu(model, CPUAccelConfig("int8", threads=1), dtype="float32")
    config = explain(model).config
    assert (config.dtype, config.threads) == ("float32", 1)


def test_accelerated_parts_are_planned_again_with_the_whole_model(model, input):
    before = model(input)
    accelerate_for_cpu(model.first, dtype="int8")
    assert len(explain(model).replaced) == 4
    accelerate_for_cpu(model, dtype="float32")
    assert {item.dtype for item in explain(model).replaced} == {"float32"}
    assert torch.equal(restore(model)(input), before)


def test_restoring_a_model_restores_its_parts(model, input):
    before = model(input)
    accelerate_for_cpu(model.first, dtype="int8")
    assert torch.equal(restore(model)(input), before)


@pytest.mark.parametrize("verb", [restore, explain, accelerate_for_cpu])
def test_parts_of_accelerated_models_are_rejected(model, verb):
    accelerate_for_cpu(model, dtype="float32")
    with pytest.raises(ValueError, match="target is a Block inside of an accelerated model"):
        verb(model.first)


def test_two_models_that_share_a_module(input):
    model, other = Model().eval(), Model().eval()
    other.first = model.first
    before = model(input), other(input)
    accelerate_for_cpu(model, dtype="float32")
    torch.testing.assert_close(other(input), before[1], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="inside of an accelerated model"):
        accelerate_for_cpu(other)
    restore(model)
    assert torch.equal(model(input), before[0])
    assert torch.equal(other(input), before[1])


def test_threads_can_run_one_model(model):
    accelerate_for_cpu(model, dtype="float32")
    inputs = [torch.randn(1, length, 64) for length in range(1, 9)]
    expected, failures = [model(input) for input in inputs], []

    def work(number):
        for _ in range(30):
            if not torch.equal(model(inputs[number]), expected[number]):
                failures.append(number)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def test_results_do_not_depend_on_the_threads_after_packing(model, input):
    accelerate_for_cpu(model, dtype="int8")
    outputs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        outputs.append(model(input))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)


def test_models_are_garbage_collected(input):
    model = accelerate_for_cpu(Model().eval(), dtype="int8")
    model(input)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_the_weights_are_released_while_accelerated(model):
    weight = model.second.weight
    accelerate_for_cpu(model, dtype="float32")
    assert weight.untyped_storage().nbytes() == 0
    packed = weakref.ref(model.second.group.packed.data)
    restore(model)
    assert weight.shape == (64, 32)
    assert packed() is None


def test_public_names():
    assert set(hf_cpu_accel.__all__) <= set(dir(hf_cpu_accel))
    assert "CPUModelForMaskedLM" in dir(hf_cpu_accel)
    with pytest.raises(AttributeError, match="'hf_cpu_accel' has no attribute 'nonsense'"):
        _ = hf_cpu_accel.nonsense


def test_a_failure_with_dropped_originals_is_undone_too(monkeypatch):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    expected = model(torch.ones(2, 64))

    def fail(context):
        raise RuntimeError("injected")

    monkeypatch.setattr("hf_cpu_accel.rewrite.apply.STAGES", (*STAGES, Stage("failing", fail)))
    with pytest.raises(RuntimeError, match="injected"):
        accelerate_for_cpu(model, dtype="int8", originals="drop")
    assert torch.equal(model(torch.ones(2, 64)), expected)


def test_the_number_of_threads_is_restored():
    model = nn.Sequential(nn.Linear(64, 64)).eval()
    torch.set_num_threads(1)
    with accelerated(model, threads=2):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 1


def test_training_mode_set_meanwhile_survives_restore():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout()).eval()
    accelerate_for_cpu(model, dtype="float32")
    model.train()
    restore(model)
    assert all(module.training for module in model.modules())


def test_half_precision_is_rejected_while_accelerated():
    model = nn.Sequential(nn.Linear(64, 64)).eval()
    accelerate_for_cpu(model, dtype="float32")
    with pytest.raises(RuntimeError, match="restore first"):
        model.half()
