"""The suites: their networks have the published sizes, and a run tells what it measured."""

import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.suites import summary
from benchmarks.suites.__main__ import chosen_cases, main
from benchmarks.suites.cases import SUITES, Case, case

# Millions of parameters, as torchvision's and timm's pages have them.
PUBLISHED = {
    "torchbench.alexnet": 61.10,
    "torchbench.densenet121": 7.98,
    "torchbench.mnasnet1_0": 4.38,
    "torchbench.mobilenet_v2": 3.50,
    "torchbench.mobilenet_v3_large": 5.48,
    "torchbench.resnet152": 60.19,
    "torchbench.resnet18": 11.69,
    "torchbench.resnet50": 25.56,
    "torchbench.resnext50_32x4d": 25.03,
    "torchbench.shufflenet_v2_x1_0": 2.28,
    "torchbench.squeezenet1_1": 1.24,
    "torchbench.vgg16": 138.36,
    "torchbench.yolov3": 61.95,
    "timm.convmixer_768_32": 21.11,
    "timm.cspdarknet53": 27.64,
    "timm.ghostnet_100": 5.18,
    "timm.gmlp_s16_224": 19.42,
    "timm.mixer_b16_224": 59.88,
    "timm.repvgg_a2": 28.21,
    "timm.resmlp_12_224": 15.35,
    "timm.tf_efficientnet_b0": 5.29,
    "timm.vit_base_patch16_224": 86.57,
    "huggingface.BertForMaskedLM": 109.51,
    "huggingface.T5Small": 60.51,
}


def built_without_memory(name):
    with torch.device("meta"):
        return case(f"{name}:1").model.build()


@pytest.mark.parametrize("name", PUBLISHED)
def test_networks_have_the_published_number_of_parameters(name):
    # Parameters that are tied count once.
    count = sum(parameter.numel() for parameter in built_without_memory(name).parameters())
    assert count / 1e6 == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize(
    "name",
    [
        "torchbench.dcgan:1",
        "torchbench.lennard_jones:1",
        "torchbench.tts_angular:2",
        "torchbench.squeezenet1_1:1",
    ],
)
def test_small_ones_are_built_alike_and_answer(name):
    found = case(name)
    model, again = found.build(), found.build()
    inputs = found.inputs(model)
    answer = found.forward(model, inputs)
    assert torch.equal(answer[0], found.forward(again, found.inputs(again))[0])
    (rows,) = found.real_tokens(answer)
    assert rows.shape[0] == next(iter(inputs.values())).shape[0]
    assert rows.isfinite().all()


def test_what_is_no_case_is_none():
    assert case("torchbench.nothing:1") is None
    assert case("nothing.vgg16:1") is None
    assert case("bert-base-uncased:1x128") is None


def test_names_of_suites_and_models():
    assert chosen_cases(["torchbench.vgg16"]) == [Case("torchbench", "vgg16", 1)]
    assert len(chosen_cases(["timm", "huggingface"])) == len(SUITES["timm"]) + len(SUITES["huggingface"])


def run(*arguments):
    import typer

    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, list(arguments))


def test_an_unknown_one_is_refused_with_those_that_are_known():
    told = run("torchbench.nothing")
    assert told.exit_code == 2
    assert "torchbench.nothing" in told.output


@pytest.mark.serial
def test_a_run_tells_ratios_and_draws_them(tmp_path):
    out, plot = tmp_path / "out.jsonl", tmp_path / "means.svg"
    told = run(
        "torchbench.lennard_jones", "--systems", "ours-fp32", "--rounds", "2", "--seconds", "0.01",
        "--no-priority", "--out", str(out), "--plot", str(plot),
    )  # fmt: skip
    assert told.exit_code == 0, told.output
    assert "torchbench: recommendation and control" in told.output
    assert plot.read_text().count("<svg") == 1
    (line,) = map(json.loads, out.read_text().splitlines())
    assert line["workload"] == "torchbench.lennard_jones:1"
    assert line["systems"]["ours-fp32"]["cosine"] > 0.9999


def test_means_are_geometric_and_tell_what_failed():
    def row(gain):
        told = {
            "eager-fp32": {"rounds": [[1.0]], "cosine": 1.0},
            "ours-fp32": {"rounds": [[1.0 / gain]], "cosine": 1.0},
        }
        return summary.Row.of(Case("timm", "mixer_b16_224", 1), told)

    failed = {"eager-fp32": {"rounds": [[1.0]], "cosine": 1.0}, "ours-fp32": {"error": "no"}}
    rows = [row(1.0), row(4.0), summary.Row.of(Case("timm", "mixer_b16_224", 1), failed)]
    names = ["eager-fp32", "ours-fp32"]
    assert summary.family_cells(summary.families(rows, names)[-1]) == ("all", "3", "2.00x of 2", "1.00x")
    assert summary.cells(rows[2], names)[3] == "failed"
