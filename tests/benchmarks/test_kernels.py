"""The kernel benchmarks: grid, hot and cold weights, and the summary over shapes."""

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import attention, kernels
from benchmarks.kernels import OURS, PARTIAL, Cell
from benchmarks.linear import __main__ as linear
from benchmarks.linear import decode
from benchmarks.linear.providers import PROVIDERS
from hf_cpu_accel.measure import Agreement, Timing
from hf_cpu_accel.packing.linear import pack_linear


def cell(case: str, provider: str, *rounds: float, dtype: str = "float32") -> Cell:
    timing = Timing(tuple((seconds,) for seconds in rounds))
    return Cell(case, dtype, provider, 1e9, 100.0, timing, Agreement(1.0, 1e-6))


def test_shares_of_the_peak() -> None:
    assert cell("a", OURS, 0.02).rate == pytest.approx(50.0)  # 1 GFLOP in 20 ms
    assert cell("a", OURS, 0.02).share == pytest.approx(50.0)


def test_the_summary_takes_the_fastest_of_torch_at_each_shape() -> None:
    cells = [
        # 80 % of the peak; torch's best is "packed", 25 % slower in each round although the machine changed its clock
        cell("fast", "plain", 0.020, 0.040),
        cell("fast", "packed", 0.0125 * 2 / 3, 0.0125 * 2),
        cell("fast", f"gemm alone{PARTIAL}", 0.001, 0.001),
        cell("fast", OURS, 0.0125 * 2 / 3 / 1.25, 0.0125 * 2 / 1.25),
        # 20 %; "plain" is best there and twice as fast
        cell("slow", "plain", 0.025, 0.025),
        cell("slow", "packed", 0.030, 0.030),
        cell("slow", OURS, 0.050, 0.050),
        cell("fast", "plain", 0.02, dtype="int8"),
        cell("fast", OURS, 0.01, dtype="int8"),
    ]
    float32, int8 = kernels.summary(cells)
    assert int8 == ("int8", "100", "100", "fast", "50", "2.00", "2.00", "fast, plain")
    dtype, geomean, worst, at, best, ratio, lowest, where = float32
    assert (dtype, worst, at) == ("float32", "20", "slow")
    assert geomean == f"{(75 * 20) ** 0.5:.0f}"
    assert best == f"{(60 * 40) ** 0.5:.0f}"
    assert ratio == f"{(1.25 * 0.5) ** 0.5:.2f}"
    assert (lowest, where) == ("0.50", "slow, plain")
    console = Console(width=140)
    with console.capture() as capture:
        console.print(kernels.summary_table(cells), kernels.table("title", cells))
    assert "slow, plain" in capture.get()
    assert "gemm alone *" in capture.get()


def test_the_grid_is_that_of_the_goals() -> None:
    sizes = [tuple(int(size) for size in case.split("x")) for case in linear.GRID]
    assert len(set(sizes)) == 24
    assert {m for m, _, _ in sizes} == {32, 128, 512, 1024}
    assert {(k, n) for _, k, n in sizes} == {
        *((768, 768), (768, 2304), (768, 3072)),
        *((3072, 768), (1024, 4096), (4096, 1024)),
    }


def test_copies_of_the_weight_fill_the_footprint() -> None:
    assert linear.copies(64 << 20, 1024, 4096) == 4
    assert linear.copies(0, 768, 768) == 1
    assert "hot weight" in linear._weights(1, 2.4)
    assert "cold weights: 4" in linear._weights(4, 16.8)


@pytest.mark.parametrize("dtype", PROVIDERS)
def test_all_linear_providers_compute_the_layer(dtype: str) -> None:
    cells = linear.measure("5x96x64", dtype, footprint=3 * 4 * 96 * 64, rounds=2, seconds=0.0)
    assert OURS in {found.provider for found in cells}
    for found in cells:
        assert found.agreement.worst_cosine > 0.999, found.provider
        assert found.share > 0
        assert len(found.timing.rounds) == 2
        assert found.operations == 2 * 5 * 96 * 64


@pytest.mark.parametrize("dtype", attention.DTYPES)
def test_both_attentions_agree(dtype: str) -> None:
    ours, torch_op = reversed(attention.measure("2x3x7x16", dtype, rounds=1, seconds=0.0))
    assert ours.provider == OURS
    assert min(ours.agreement.worst_cosine, torch_op.agreement.worst_cosine) > 0.9999
    assert ours.operations == 4 * 2 * 3 * 7 * 7 * 16


@pytest.mark.parametrize("weight", ["bfloat16", "int4 g64"])
def test_decoding_goes_round_over_weights(weight: str) -> None:
    layers = decode.copies(weight, 64, 128, footprint=5 * pack_linear(torch.ones(64, 128), "int8").nbytes)
    assert len({layer.data.data_ptr() for layer in layers}) == len(layers) >= 2
    found = decode.measure("64x128", weight, [1, 3], footprint=1 << 16, rounds=1)
    assert [m for m, _, _ in found] == [1, 3]
    assert all(rate > 0 and share > 0 for _, rate, share in found)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (decode.main, ["--weights", "int4"], "int4 g32"),
        (linear.main, ["8x8"], "MxKxN"),
        (linear.main, ["0x8x8"], "MxKxN"),
        (linear.main, ["8x8x8", "--grid"], "--grid"),
        (linear.main, ["8x8x8", "--dtypes", "int4"], "bfloat16"),
        (attention.main, ["8x8x8"], "BxHxLxD"),
        (attention.main, ["--dtypes", "int8"], "bfloat16"),
    ],
)
def test_bad_arguments_name_what_is_accepted(command: object, arguments: list[str], message: str) -> None:
    app = typer.Typer()
    app.command()(command)  # type: ignore[type-var]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.output
