import dataclasses
import json

import pytest
from torch import nn

from hf_cpu_accel import CPUAccelConfig, extension
from hf_cpu_accel import plan as plans
from hf_cpu_accel.plan import Plan, PlanItem
from hf_cpu_accel.runtime import hardware


def _plan() -> Plan:
    items = (
        *(PlanItem(f"layer.{i}.query", "linear", "linear", "int8", 2_000_000, None) for i in range(3)),
        PlanItem("pooler2", "linear", "linear", "int8", 500_000, None),
        PlanItem.left("embeddings", "Embedding", "a table lookup"),
    )
    config = CPUAccelConfig("int8", skip_modules=("head",))
    return Plan(items, "int8", "avx2", 2, "one per core", "native", config=config)


def test_sums_and_counts():
    plan = _plan()
    assert plan.counts() == {"linear": 4}
    assert plan.packed_bytes == 6_500_000
    assert [item.name for item in plan.left] == ["embeddings"]
    assert len(plan.replaced) == 4


def test_table_shows_all_modules_and_merges_equal_layers():
    text = str(_plan())
    assert "4 modules replaced, 1 left; int8; native kernels, tier avx2; 6.5 MB packed" in text
    assert "2 threads: one per core" in text
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert "x3" in lines["layer.*.query"]
    assert "6.00" in lines["layer.*.query"]
    assert "0.50" in lines["pooler2"]
    assert "a table lookup" in lines["embeddings"]


def test_other_providers_have_a_column():
    plan = _plan()
    assert "provider" not in str(plan).splitlines()[3]
    served = dataclasses.replace(plan.items[0], provider="oneDNN: 65-128 rows", copied_bytes=8_000_000)
    plan = dataclasses.replace(plan.with_items((served, *plan.items[1:])), providers="kept in a file")
    text = str(plan)
    assert "6.5 MB packed and 8.0 MB copied for other providers" in text
    assert "providers: kept in a file" in text
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert "oneDNN: 65-128 rows" in lines["layer.0.query"]
    assert "10.00" in lines["layer.0.query"]
    assert "x2" in lines["layer.*.query"]
    fields = plan.to_dict()["items"][0]
    assert (fields["provider"], fields["copied_bytes"]) == ("oneDNN: 65-128 rows", 8_000_000)


def test_dict_is_json_with_all_items():
    fields = json.loads(json.dumps(_plan().to_dict()))
    assert len(fields["items"]) == 5
    assert fields["items"][0]["name"] == "layer.0.query"
    assert fields["config"]["skip_modules"] == ["head"]
    assert fields["dtype"] == "int8"


def test_empty_plans_say_that_nothing_is_accelerated():
    plan = plans.nothing(threads=7)
    assert plan.items == ()
    assert plan.dtype == "none"
    assert plan.threads == 7
    assert "nothing is accelerated" in str(plan)
    assert plan.to_dict()["config"] is None


@pytest.mark.parametrize(("fast", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_bfloat16_only_where_it_is_fast(monkeypatch, fast, dtype):
    monkeypatch.setattr(hardware, "native_bf16_is_fast", lambda: fast)
    plan = plans.make(CPUAccelConfig(), nn.Linear(4, 4), threads=2, thread_reason="two")
    assert plan.dtype == dtype
    assert (plan.threads, plan.thread_reason) == (2, "two")
    assert plans.make(CPUAccelConfig("int8"), nn.Linear(4, 4), threads=1, thread_reason="").dtype == "int8"


class _Generator(nn.Linear):
    def can_generate(self) -> bool:
        return True


@pytest.mark.parametrize(
    "module", [_Generator(4, 4), nn.Linear(4, 4).bfloat16()], ids=["generates", "narrow"]
)
def test_auto_is_bfloat16_for_decoders_and_bfloat16_weights(monkeypatch, module):
    monkeypatch.setattr(hardware, "native_bf16_is_fast", lambda: False)
    assert plans.make(CPUAccelConfig(), module, threads=1, thread_reason="").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("loaded", "kernels", "tier"), [(True, "native", "avx2"), (False, "reference", "reference")]
)
def test_kernels_and_tier_are_named(monkeypatch, loaded, kernels, tier):
    status = extension.ExtensionStatus(loaded, None, "avx2" if loaded else None, False, None)
    monkeypatch.setattr(extension, "status", lambda: status)
    plan = plans.nothing(threads=1)
    assert (plan.kernels, plan.tier) == (kernels, tier)


def test_join_takes_all_items():
    first, second = _plan(), plans.nothing(threads=1).with_items((PlanItem.left("x", "X", "no"),))
    assert plans.join([first, second]).items == first.items + second.items
