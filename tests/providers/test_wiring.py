"""A model whose linears all go to another provider: same answers, and all that one can do with a model."""

import copy
import io
import pickle

import pytest
import torch
import transformers
from torch import nn

from hf_cpu_accel import CPUAccelConfig, accelerate_for_cpu, explain, restore
from hf_cpu_accel.providers.autotune import NATIVE
from hf_cpu_accel.providers.layer import native_everywhere
from hf_cpu_accel.providers.torch_ops import candidates
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.linear.match import pack

WIDTH = 64
BFLOAT16 = ["bfloat16"] * bool(candidates("bfloat16"))  # torch has no such products for CPUs with AVX2 only


class Block(nn.Module):
    """Merged projections, a feed-forward module, and linears with activation, residual and norm: every kind of work."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, size) for size in (64, 64, 32))
        self.mix = nn.Linear(32, WIDTH)
        self.up = nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU())
        self.output = Output()
        self.ffn = FeedForward()

    def forward(self, x):
        weights = torch.softmax(self.query(x) @ self.key(x).transpose(-1, -2) / 8, -1)
        y = x + self.mix(weights @ self.value(x))
        return self.ffn(self.output(self.up(y), y))


class Output(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Linear(96, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, hidden, input):
        return self.norm(self.dense(hidden) + input)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi, self.wo, self.act = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH), nn.ReLU()

    def forward(self, x):
        return self.wo(self.act(self.wi(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x):
        return self.blocks(x)


@pytest.fixture
def model():
    return Model().eval()


INPUT = torch.randn(2, 15, WIDTH, generator=torch.Generator().manual_seed(1))


def between_providers(measurements):
    """The measurements that were not about fused parts and their own forward."""
    return [held for held in measurements.held if "unfused" not in held]


def run(model, input=INPUT):
    """The third forward: projections are merged, and everything is measured."""
    with torch.no_grad():
        for _ in range(3):
            output = model(input)
    return output


def providers(model):
    return {item.name: item.provider for item in explain(model).replaced if item.packed_bytes}


@pytest.mark.parametrize("dtype", ["float32", *BFLOAT16])
def test_another_provider_gives_the_same_and_restores(model, force, dtype):
    expected = run(model)
    accelerate_for_cpu(model, dtype=dtype, providers="own")
    ours = run(model)
    restore(model)
    measurements = force("oneDNN")
    accelerate_for_cpu(model, dtype=dtype)
    theirs = run(model)
    # One question per kind of work, not per layer: merged projections, mix, up, output, ffn; none for a projection alone. And mix
    # with the residual after it, which the steps of a recorded block add.
    assert len(between_providers(measurements)) == 6
    if dtype == "float32":
        torch.testing.assert_close(theirs, expected, rtol=1e-4, atol=1e-4)
    else:
        assert (theirs - expected).norm() <= 1.5 * (ours - expected).norm() + 1e-2 * expected.norm()
    assert set(providers(model).values()) == {"oneDNN: 17-32 rows"}
    restore(model)
    torch.testing.assert_close(run(model), expected, rtol=0, atol=0)


def test_int8_is_ours_where_nothing_keeps_its_numerics(model, force):
    measurements = force("oneDNN", find_candidates=lambda dtype: ())
    accelerate_for_cpu(model, dtype="int8")
    run(model)
    assert set(providers(model).values()) == {"ours"}
    assert all(held == [NATIVE] for held in between_providers(measurements))


def test_the_copies_are_counted_and_freed(model, force):
    force("oneDNN")
    accelerate_for_cpu(model, dtype="float32")
    assert explain(model).copied_bytes == 0
    run(model)
    plan = explain(model)
    # Every weight once: merged projections have a copy for each member.
    assert plan.copied_bytes == sum(
        4 * m.weight.numel() for m in model.modules() if isinstance(m, PackedLinear)
    )
    assert f"and {plan.copied_bytes / 1e6:.1f} MB copied for other providers" in str(plan)
    assert "the fastest measured, cached in" in str(plan)
    assert plan.to_dict()["items"][0]["provider"] == "oneDNN: 17-32 rows"


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_of_the_model_make_their_own(model, force, way):
    force("oneDNN")
    expected = run(model)
    accelerate_for_cpu(model, dtype="float32", originals="memory")
    run(model)
    if way == "deepcopy":
        twin = copy.deepcopy(model)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert explain(twin).copied_bytes == 0
    torch.testing.assert_close(run(twin), expected, rtol=1e-4, atol=1e-4)
    assert explain(twin).copied_bytes == explain(model).copied_bytes > 0
    restore(twin)
    torch.testing.assert_close(run(twin), expected, rtol=0, atol=0)
    assert set(providers(model).values()) == {"oneDNN: 17-32 rows"}


@pytest.mark.parametrize("dtype", BFLOAT16)
def test_a_model_that_is_cast_keeps_its_providers(model, force, dtype):
    force("oneDNN")
    accelerate_for_cpu(model, dtype=dtype)
    expected = run(model)
    model.to(torch.bfloat16)
    given = run(model, INPUT.bfloat16())
    assert given.dtype is torch.bfloat16
    assert (given - expected).norm() <= 2e-2 * expected.norm()
    assert set(providers(model).values()) == {"oneDNN: 17-32 rows"}


@pytest.mark.parametrize("by", ["argument", "config", "environment"])
def test_it_can_be_switched_off(model, force, monkeypatch, by):
    measurements = force("oneDNN")
    if by == "environment":
        monkeypatch.setenv("HF_CPU_ACCEL_PROVIDERS", "own")
    options = {"providers": "own"} if by == "argument" else {}
    config = CPUAccelConfig(providers="own") if by == "config" else None
    accelerate_for_cpu(model, config, dtype="float32", **options)
    run(model)
    assert between_providers(measurements) == []
    assert set(providers(model).values()) == {"ours"}
    assert "providers: hf_cpu_accel only: " in str(explain(model))


def test_a_bad_switch_leaves_the_model_alone(model, monkeypatch):
    monkeypatch.setenv("HF_CPU_ACCEL_PROVIDERS", "off")
    before = list(model.modules())
    with pytest.raises(ValueError, match="HF_CPU_ACCEL_PROVIDERS='off'"):
        accelerate_for_cpu(model)
    assert list(model.modules()) == before


def test_accelerating_measures_nothing(force):
    measurements = force("oneDNN")
    size = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=50, **size)).eval()
    accelerate_for_cpu(bert, dtype="float32")
    assert between_providers(measurements) == []


@pytest.mark.parametrize(("winner", "expected"), [(NATIVE, True), ("oneDNN", False)])
def test_native_everywhere_measures_once(force, monkeypatch, winner, expected):
    measurements = force(winner)
    qkv = pack([nn.Linear(WIDTH, WIDTH) for _ in range(3)], "float32", measured=True)
    up, down = (pack([nn.Linear(*s)], "float32", measured=True)[0] for s in ((WIDTH, 96), (96, WIDTH)))
    linears = (*qkv, up, down)
    assert native_everywhere(linears, 30) is expected
    assert len(between_providers(measurements)) == 3  # the projections as one
    monkeypatch.setattr("hf_cpu_accel.providers.choice.chooser", None)
    assert native_everywhere(linears, 32) is expected
    assert native_everywhere(linears, 3) is True


def test_native_everywhere_keeps_the_fusion_for_a_small_gain(force):
    force("oneDNN").seconds.update({NATIVE: 1.0, "oneDNN": 0.95})
    linear = pack([nn.Linear(WIDTH, WIDTH)], "float32", measured=True)[0]
    assert linear.group.route(0, 0).choice(30, torch.float32).provider == "oneDNN"
    assert native_everywhere([linear], 30) is True


def test_native_everywhere_is_yes_while_it_is_not_known(force, monkeypatch):
    force("oneDNN")
    linear = pack([nn.Linear(WIDTH, WIDTH)], "float32", measured=True)[0]
    with monkeypatch.context() as patch:
        patch.setattr("hf_cpu_accel.providers.choice.Chooser.choose", lambda *args: None)
        assert native_everywhere([linear], 30) is True
    assert native_everywhere([linear], 30) is False
    unmeasured = pack([nn.Linear(WIDTH, WIDTH)], "float32")[0]
    assert native_everywhere([unmeasured], 30) is True


def test_native_everywhere_is_yes_in_a_graph_and_leaves_its_sizes_open(force):
    force("oneDNN")
    linear = pack([nn.Linear(WIDTH, WIDTH)], "float32", measured=True)[0]
    assert native_everywhere([linear], 30) is False
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: x * 2 if native_everywhere([linear], x.shape[0]) else x * 3,
        backend=backend,
        fullgraph=True,
        dynamic=True,
    )
    for rows in (30, 5, 60):
        assert torch.equal(compiled(torch.ones(rows, 2)), torch.full((rows, 2), 2.0))
    assert len(graphs) == 1
