"""Any failure leaves the model exactly as it was; copies and pickles can be restored, too."""

import copy
import pickle

import pytest
import torch
from torch import nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.patching.restore import Journal
from hf_cpu_accel.rewrite import apply as rewrite
from hf_cpu_accel.rewrite.registry import RULES, STAGES, Stage
from tests.rewrite.core.undo_models import ALL, Injected
from tests.rewrite.families import FAMILIES, batches

BATCH = batches()["right"]


class Snapshot:
    """All that must be the same again: modules, parameters, values, flags, configs, hooks, attributes, outputs."""

    def __init__(self, family, model):
        self.family, self.model = family, model
        self.state = self._read()

    def _read(self):
        model = self.model
        return {
            "modules": [(path, id(module)) for path, module in model.named_modules()],
            "parameters": [(path, id(p), p.requires_grad, p.shape) for path, p in model.named_parameters()],
            "attributes": [sorted(vars(module)) for module in model.modules()],
            "configs": [id(vars(module).get("config")) for module in model.modules()],
            "implementation": getattr(vars(model).get("config"), "_attn_implementation", None),
            "hooks": len(model._load_state_dict_pre_hooks),
            "forward hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
            "values": {name: value.clone() for name, value in model.state_dict().items()},
            "output": self.family.run(model, BATCH),
            "random numbers": torch.get_rng_state().numpy().tobytes(),  # that others go on drawing
        }

    def check(self):
        now = self._read()
        values, before = now.pop("values"), self.state["values"]
        assert list(values) == list(before)
        assert all(torch.equal(value, before[name]) for name, value in values.items())
        assert torch.equal(now.pop("output"), self.state["output"])
        assert now == {name: self.state[name] for name in now}
        assert explain(self.model).items == ()


USED = [("bert-mlm", name) for name in ("embeddings", "attention", "linear block", "merged projections")]
USED += [("t5", name) for name in ("attention", "ffn", "norm", "merged projections")]
USED += [("gpt2", "transposed linear"), ("mixtral", "experts")]
USED += [
    ("picture", name)
    for name in (
        "processor attention",
        "group norm",
        "batch norm",
        "convolution as linear",
        "convolution",
        "convolution over time",
        "snake",
        "grouped convolution",
        "transposed convolution",
        "transposed convolution of images",
    )
]
USED += [
    ("torch", "multi-head attention"),
    ("torch", "lstm"),
    ("words", "split head"),
    ("file", "stored linears"),
    ("static", "static int8"),
]
CASES = [(*used, dtype) for used in USED for dtype in ("float32", "int8")]
# The tied decoder is the only linear on its own.
CASES += [("bert-mlm", "linear", "int8"), ("bert-mlm", "shared linear", "float32")]
CASES.append(("picture", "gemm convolution", "int8"))


def test_every_rule_is_covered_below():
    assert {name for _, name, _ in CASES} == {rule.name for rule in RULES}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("name", "rule_name", "dtype"), CASES)
def test_a_failure_in_any_rule_undoes_everything(monkeypatch, name, rule_name, dtype, when):
    family = ALL[name]
    model = family.build()
    snapshot = Snapshot(family, model)
    rule = next(rule for rule in RULES if rule.name == rule_name)
    apply, calls = rule.apply, []

    def failing(match, context):
        calls.append(match.path)
        if when == "after":
            apply(match, context)
        raise Injected

    monkeypatch.setattr(rule, "apply", failing, raising=False)
    with pytest.raises(Injected):
        accelerate_for_cpu(model, dtype=dtype)
    assert len(calls) == 1
    snapshot.check()


@pytest.mark.parametrize(
    ("name", "dtype"), [("bert-mlm", "int8"), ("distilbert", "float32"), ("t5", "bfloat16"), ("gpt2", "int4")]
)
def test_a_failure_at_any_change_undoes_everything(monkeypatch, name, dtype):
    family = ALL[name]
    model = family.build()
    snapshot = Snapshot(family, model)
    record, countdown = Journal.record, [0]

    def failing(journal, change):
        if countdown[0] == 0:
            raise Injected
        countdown[0] -= 1
        record(journal, change)

    monkeypatch.setattr(Journal, "record", failing)
    position = 0
    while True:
        countdown[0] = position
        try:
            accelerate_for_cpu(model, dtype=dtype)
        except Injected:
            snapshot.check()
            # All kinds of changes come early, the later ones are the same in other layers.
            position += 1 if position < 30 else 7
            continue
        break
    assert position > 20
    restore(model)
    snapshot.check()


@pytest.mark.parametrize("name", ["picture", "bert-mlm", "swin", "resnet", "convnext", "mixtral"])
@pytest.mark.parametrize("number", range(len(STAGES)), ids=[stage.name for stage in STAGES])
def test_a_failure_after_any_stage_undoes_everything(monkeypatch, name, number):
    family = ALL[name]
    model = family.build()
    snapshot = Snapshot(family, model)
    stage = STAGES[number]

    def failing(context):
        list(stage.apply(context) or ())
        raise Injected

    monkeypatch.setattr(
        rewrite, "STAGES", (*STAGES[:number], Stage(stage.name, failing), *STAGES[number + 1 :])
    )
    with pytest.raises(Injected):
        accelerate_for_cpu(model, dtype="int8")
    snapshot.check()


def test_an_interrupt_undoes_everything(monkeypatch):
    family = FAMILIES["bert"]
    model = family.build()
    snapshot = Snapshot(family, model)
    interrupted = Stage("interrupted", lambda context: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setattr(rewrite, "STAGES", (*STAGES, interrupted))
    with pytest.raises(KeyboardInterrupt):
        accelerate_for_cpu(model, dtype="int8")
    snapshot.check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", ["bert-mlm", "t5", "bart"])
def test_deep_copies_are_models_of_their_own(name, dtype):
    family = FAMILIES[name]
    model = family.build()
    before = family.run(model, BATCH)
    accelerate_for_cpu(model, dtype=dtype)
    output = family.run(model, BATCH)
    twin = copy.deepcopy(model)
    assert explain(twin).to_dict() == explain(model).to_dict()
    restore(model)
    assert torch.equal(family.run(model, BATCH), before)
    assert torch.equal(family.run(twin, BATCH), output)
    with pytest.raises(RuntimeError, match="state_dict"):
        twin.load_state_dict({})
    restore(twin)
    assert torch.equal(family.run(twin, BATCH), before)
    assert explain(twin).items == ()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", ["bert-mlm", "t5"])
def test_pickles(name, dtype):
    family = FAMILIES[name]
    model = family.build()
    before = family.run(model, BATCH)
    accelerate_for_cpu(model, dtype=dtype)
    output = family.run(model, BATCH)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(family.run(twin, BATCH), output)
    assert explain(twin).counts() == explain(model).counts()
    if dtype == "float32":
        assert torch.equal(family.run(restore(twin), BATCH), before)
    else:
        with pytest.raises(RuntimeError, match="load it again"):
            restore(twin)
        assert torch.equal(family.run(twin, BATCH), output)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_saved_checkpoint_is_an_ordinary_one(tmp_path, dtype):
    family = FAMILIES["bert-mlm"]
    model = accelerate_for_cpu(family.build(), dtype=dtype)
    output = family.run(model, BATCH)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    tokens = BATCH["attention_mask"].bool()  # logits at the padding are nobody's
    torch.testing.assert_close(family.run(loaded, BATCH)[tokens], output[tokens], rtol=0.05, atol=0.05)


def test_flags_of_parameters_come_back_as_they_were():
    model = FAMILIES["bert"].build()
    model.embeddings.requires_grad_(False)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    accelerate_for_cpu(model, dtype="float32")
    assert not any(p.requires_grad for p in model.parameters())
    restore(model)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_strides_come_back(dtype):
    """Weights that were made as views of others, or are stored with their channels last (SEW-D)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(32, 32, 3), nn.Linear(30, 32), nn.Linear(32, 64)).eval()
    model[0].weight = nn.Parameter(torch.randn(32, 3, 32).transpose(1, 2))
    model[2].weight = nn.Parameter(torch.randn(32, 64).T)
    before = {name: (p.clone(), p.stride()) for name, p in model.named_parameters()}
    accelerate_for_cpu(model, dtype=dtype)
    assert len(explain(model).replaced) >= 2
    restore(model)
    for name, parameter in model.named_parameters():
        values, strides = before[name]
        assert torch.equal(parameter, values)
        assert parameter.stride() == strides
