"""`hf-cpu-accel report`: the page has the numbers that were measured, needs nothing else, and is well formed."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from typer.testing import CliRunner

from hf_cpu_accel import accelerate_for_cpu, explain
from hf_cpu_accel.cli.main import app
from hf_cpu_accel.cli.report import layers, measure, page
from hf_cpu_accel.cli.tables import milliseconds
from hf_cpu_accel.measure import environment
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.plan_tree import tree
from hf_cpu_accel.runtime import hardware

PEAKS = hardware.Peaks(100.0, 200.0, 400.0, 20.0, 1)
_VOID = {"meta", "br", "link", "img", "hr", "input", "path", "use", "rect"}
_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}


class Checked(HTMLParser):
    """Every element is closed by its own end; what it refers to is in the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src", "xlink:href"):
                self.references.append(value)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in _VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    bert = transformers.BertConfig(vocab_size=100, **_SMALL)
    llama = transformers.LlamaConfig(vocab_size=100, num_key_value_heads=2, **_SMALL)
    vit = transformers.ViTConfig(image_size=32, patch_size=8, **_SMALL)
    return {
        "encoder": transformers.BertModel(bert).eval(),
        "decoder": transformers.LlamaForCausalLM(llama).eval(),
        "vision": transformers.ViTModel(vit).eval(),
    }


@pytest.fixture(scope="module", params=["encoder", "decoder", "vision"])
def made(request) -> tuple[measure.Report, str]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = models()[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "measure_peaks", lambda threads: PEAKS)
        subject = measure.Subject(f"<{request.param}>", 2, 12, lambda: model)
        report = measure.measure(subject, ["float32", "int8"], repeats=2, threads=1)
    torch.set_num_threads(threads)
    return report, page.page(report, environment.environment(), "a caption")


def test_the_page_shows_the_results(made):
    report, html = made
    text = " ".join(" ".join(Checked(html).text).split())
    for result in report.results:
        assert milliseconds(result.seconds.value) in text
    for result in report.results[1:]:
        assert f"{result.speedup.value:.2f}x" in text
        assert f"{result.agreement.worst_cosine:.6f}" in text
    for layer in report.layers:
        assert layer.refused == ""
        assert f"{milliseconds(layer.before.value)} → {milliseconds(layer.after.value)} ms" in text
        assert f"cosine {layer.agreement.worst_cosine:.5f}" in text
    assert f"{report.plan.packed_bytes / 1e6:.1f} MB" in text
    assert "100 GFLOP/s float32" in text
    assert f"<{report.subject.title[1:-1]}>" in text


def test_layers_cover_the_model_and_agree_with_eager(made):
    report, _ = made
    paths = [layer.path for layer in report.layers]
    assert sum(bool(re.search(r"layers?\.\d$", path)) for path in paths) == 2
    assert len(paths) == len(set(paths))
    blocks = [layer for layer in report.layers if re.search(r"layers?\.\d$", layer.path)]
    for layer in blocks:
        assert 0.98 < layer.agreement.worst_cosine <= 1
        assert layer.operations > 0
        assert 0 < layer.weight_bytes < 4 * sum(p.numel() for p in models()["encoder"].parameters())
        assert layer.rate == pytest.approx(layer.operations / layer.after.value / 1e9)


def test_the_page_loads_nothing(made):
    _, html = made
    checked = Checked(html)
    assert all(reference.startswith("#") for reference in checked.references)
    assert {reference[1:] for reference in checked.references} <= set(checked.ids)
    assert len(checked.ids) == len(set(checked.ids))
    outside = set(re.findall(r"https?://[^\"' <]+", html))
    assert outside <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"<script|@import|url\((?!#)", html)


def test_operations_of_a_linear_are_counted():
    model = nn.Sequential(nn.Linear(32, 48))
    (layer,) = layers.measure(model, model, explain(model), lambda m: m(torch.randn(5, 32)), rounds=1)
    assert layer.operations == 2 * 5 * 32 * 48
    assert layer.weight_bytes == 4 * (32 * 48 + 48)


def test_layers_that_fail_alone_are_reported():
    class Once(nn.Linear):
        calls = 0

        def forward(self, input):
            self.calls += 1
            if self.calls > 1:
                raise RuntimeError("only <once>")
            return super().forward(input)

    model = nn.Sequential(Once(4, 4))
    (layer,) = layers.measure(model, model, explain(model), lambda m: m(torch.randn(2, 4)), rounds=1)
    assert layer.refused == "RuntimeError: only <once>"


def test_a_plan_in_a_notebook_is_the_same_tree():
    model = models()["encoder"]
    plan = explain(accelerate_for_cpu(model, dtype="float32", threads=1))
    html = plan._repr_html_()
    text = " ".join(Checked(html).text)
    assert "modules replaced" in text
    assert tree(plan.items).split("<ul>", 1)[1] == html.split("<ul>", 1)[1]
    assert "<b>x2</b>" in html  # two layers that are alike
    left = PlanItem.left("a.b", "Odd<>", "has & hooks")
    assert "Odd&lt;&gt;" in tree([left])
    assert "has &amp; hooks" in tree([left])
    Checked(explain(models()["vision"])._repr_html_())


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hardware, "measure_peaks", lambda threads: PEAKS)
    out, folder = tmp_path / "page.html", tmp_path / "tiny"
    models()["encoder"].save_pretrained(folder)
    command = ["report", str(folder), "--seq", "8", "--repeats", "1", "--dtypes", "float32", "--threads", "1"]
    result = CliRunner().invoke(app, [*command, "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "<h1>tiny</h1>" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--random-config", "nothing"], "random_config='nothing'"),
        (["--random-config", "bert-tiny", "--dtypes", "int3"], "'int3' is unknown"),
        (["--random-config", "bert-tiny", "-o", "none/page.html"], "is not a folder"),
        ([], "pass either MODEL"),
    ],
)
def test_wrong_options(options, words):
    result = CliRunner().invoke(app, ["report", *options], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert words in result.output
