"""Times of the same call with and without acceleration, and the description of the plan."""

import copy
import re
import time

import pytest
import torch
from torch import nn

from hf_cpu_accel import accelerate_for_cpu, explain
from hf_cpu_accel.measure.timing import Timing
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.serve.comparison import (
    PLAN_COLUMNS,
    Comparison,
    Pair,
    compare_calls,
    compare_seconds,
    format_seconds,
    meaning,
    plan_rows,
    plan_sentence,
)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 7), nn.Dropout(0.1)).eval()


def test_pair_leaves_the_model_and_accelerates_its_copy():
    model = make_model()
    x, weights = torch.randn(5, 24), copy.deepcopy(model.state_dict())
    before = model(x)
    pair = Pair(model, dtype="float32")
    assert pair.eager is model
    assert torch.equal(model(x), before)
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in weights.items())
    assert not explain(model).items
    assert explain(pair.accelerated).replaced
    torch.testing.assert_close(pair.accelerated(x), before, rtol=1e-5, atol=1e-5)


def test_pair_changes_its_dtype_when_asked():
    pair = Pair(make_model(), dtype="float32")
    assert pair.use("float32").dtype == "float32"
    assert pair.use("int8").dtype == "int8"
    assert explain(pair.accelerated).dtype == "int8"
    with pytest.raises(ValueError, match="int3"):
        pair.use("int3")
    assert pair.use("int8").dtype == "int8"


def test_calls_alternate_and_rates_use_the_amount():
    order = []

    def call(name: str, seconds: float) -> None:
        order.append(name)
        time.sleep(seconds)

    comparison = compare_calls(
        lambda: call("eager", 0.02),
        lambda: call("accelerated", 0.005),
        amount=10,
        unit="texts",
        rounds=2,
    )
    assert order == [*["eager"] * 2, *["accelerated"] * 4, *["eager"] * 2]
    eager, accelerated = comparison.seconds
    assert eager >= 0.02
    assert accelerated >= 0.005
    assert comparison.rates == (10 / eager, 10 / accelerated)


def test_speedup_is_the_median_of_per_round_ratios():
    eager, accelerated = Timing(((1.0,), (10.0,), (1.0,))), Timing(((0.5,), (2.5,), (0.5,)))
    comparison = Comparison(eager, accelerated, amount=2, unit="texts")
    assert comparison.speedup == 2
    assert comparison.rates == (2, 4)
    assert str(comparison) == "Speedup 2.00x: 500 ms instead of 1.00 s for 2 texts"


def test_slower_calls_are_labeled_slower():
    assert str(compare_seconds(1.0, 2.0, amount=4, unit="images")) == (
        "Speedup 0.50x (slower): 2.00 s instead of 1.00 s for 4 images"
    )
    assert str(compare_seconds(0.3, 0.1, amount=4, unit="images")) == (
        "Speedup 3.00x: 100 ms instead of 300 ms for 4 images"
    )


@pytest.mark.parametrize(
    ("seconds", "text"), [(12.345, "12.35 s"), (0.0123, "12.3 ms"), (0.00012, "0.12 ms")]
)
def test_times_have_a_fitting_unit(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize("settings", [{"amount": 0}, {"amount": -1}, {"eager": 0.0}, {"accelerated": -1.0}])
def test_times_and_amounts_must_be_positive(settings):
    with pytest.raises(ValueError, match="above 0"):
        compare_seconds(**{"eager": 1.0, "accelerated": 1.0, "amount": 1, "unit": "images", **settings})


def test_chart_has_both_rates():
    figure = compare_seconds(0.5, 0.25, amount=100, unit="tokens").chart()
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [200, 400]
    assert [text.get_text().strip() for text in axes.texts] == ["200", "400"]
    assert axes.get_title(loc="left") == "tokens/s (longer is better)"


def test_plan_rows_cover_all_modules():
    model = nn.Sequential(make_model(), make_model(), nn.Embedding(5, 4)).eval()
    plan = explain(accelerate_for_cpu(model, dtype="int8"))
    rows = plan_rows(plan)
    assert all(len(row) == len(PLAN_COLUMNS) for row in rows)
    counts = [int(row[0].split(" x ")[0]) if " x " in row[0] else 1 for row in rows]
    assert sum(counts) == len(plan.items)
    left = [row for row in rows if row[1].startswith("left: ")]
    assert sum(counts[rows.index(row)] for row in left) == len(plan.left)
    assert rows[len(rows) - len(left) :] == left
    assert {row[2] for row in rows if row not in left} == {"int8"}
    sentence = plan_sentence(plan)
    assert f"{len(plan.replaced)} modules replaced, {len(plan.left)} left" in sentence
    assert re.search(r"; int8, [\d.]+ MB of packed weights; ", sentence)


def test_plan_of_nothing():
    assert plan_sentence(explain(make_model())) == "Nothing is accelerated."
    assert plan_rows(explain(make_model())) == []


def test_descriptions_of_structures():
    assert meaning("encoder layer") == "a fused transformer layer in one call"
    assert meaning("first token: encoder layer").endswith("in one call, for the first token only")
    assert "without a copy per edge (mean)" in meaning("source rows, mean")
    assert meaning("something new") == "something new"
    plan = explain(make_model()).with_items((PlanItem("a", "b", "c", "d", 0, None),))
    assert plan_rows(plan) == [["b", "b", "d"]]
