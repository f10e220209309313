"""The table and the chart of the README, measured on this machine in about half an hour:

python -m benchmarks.peers.setup openvino llamacpp
python -m benchmarks.headline --record benchmarks/results
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from benchmarks import harness
from benchmarks.generation import harness as generation_harness
from benchmarks.generation import report as generation_report
from benchmarks.gnn.cases import COMPILED, model_cases, timings_of
from benchmarks.gnn.graphs import SIZES, rmat
from benchmarks.results.headline import COLUMNS, GROUP, TITLE
from benchmarks.session import GenerationSettings, Keep, Out, Session, Settings, Threads
from hf_cpu_accel.cli.tables import milliseconds
from hf_cpu_accel.measure import Timing, speedup

# In the order of COLUMNS: eager, torch.compile, a rival, ours, a rival with quantized weights, ours with quantized weights.
ENCODER_SYSTEMS = (
    "eager-fp32",
    "compile-freeze-fp32",
    "openvino-fp32",
    "ours-fp32",
    "openvino-int8",
    "ours-int8",
)
WRITER_SYSTEMS = ("eager-bf16", "compile-bf16", "llamacpp-bf16", "ours-bf16", "llamacpp-q4_0", "ours-int4")
GRAPH_SYSTEMS = ("PyG edge_index", COMPILED, "PyG sparse CSR", "ours", None, None)
ENCODERS = {
    "all-MiniLM-L6-v2:32x64": "MiniLM-L6, 32 texts of 64 tokens",
    "bert-base-uncased:1x128": "BERT-base, 128 tokens",
    "roberta-base:16x8-128": "RoBERTa-base, 16 texts of 8 to 128 tokens",
    "vit-base:1": "ViT-base, one image",
    "resnet-50:1": "ResNet-50, one image",
    "whisper-base-encoder:1": "Whisper-base encoder, 30 s of audio",
}
WRITER = "Llama-3.2-1B"
GRAPH = ("arxiv", "GCN, 2.3 million edges")


@dataclass(frozen=True)
class Row:
    """One model: the eager number as text, and the timing of each column, None where the system has no such mode or failed."""

    label: str
    eager: str
    timings: Sequence[Timing | None]

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table: speedups are medians of the ratios of each round."""
        base, *others = self.timings
        assert base is not None
        ratios = ("-" if other is None else f"{speedup(base, other).value:.2f}x" for other in others)
        return (self.label, self.eager, *ratios)


def encoder_row(session: Session, workload: str, label: str) -> Row:
    """Measure one forward pass of a model with random weights."""
    records = {record.system: record for record in session.measure(workload, ENCODER_SYSTEMS)}
    timings = [records[system].timing for system in ENCODER_SYSTEMS]
    assert timings[0] is not None
    return Row(label, f"{milliseconds(timings[0].seconds.value)} ms", timings)


def writer_rows(session: Session, model: str, settings: GenerationSettings) -> list[Row]:
    """Measure the prefill and the decode of a language model with random weights."""
    title = f"{model}, {settings.prompt} + {settings.new} tokens"
    records = {record.system: record for record in session.measure(model, WRITER_SYSTEMS, title)}
    rows = []
    for phase, part, tokens in (
        (f"prefill of {settings.prompt} tokens", "first", settings.prompt),
        ("decode", "step", 1),
    ):
        timings = [
            getattr(records[system], part) if records[system].runs else None for system in WRITER_SYSTEMS
        ]
        rows.append(Row(f"{model}, {phase}", f"{tokens / timings[0].seconds.value:.3g} tokens/s", timings))
    return rows


def graph_row(name: str, label: str, rounds: int) -> Row:
    """Measure the inference of a GCN of two layers on a random graph of the size of a known one."""
    nodes, edges = SIZES[name]
    cases = model_cases(rmat(nodes, edges), nodes, train=False, names=["GCN"], compiled=True)
    (systems,) = cases.values()
    systems = {system: systems[system] for system in GRAPH_SYSTEMS if system is not None}
    timings = timings_of(systems, rounds)
    return Row(
        label,
        f"{milliseconds(timings[GRAPH_SYSTEMS[0] or ''].seconds.value)} ms",
        [None if system is None else timings[system] for system in GRAPH_SYSTEMS],
    )


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Bursts of each system.")] = 5,
    seconds: Annotated[float, typer.Option(min=0, help="Minimum length of a burst, in seconds.")] = 0.5,
    threads: Threads = None,
    out: Out = None,
    record: Keep = None,
) -> None:
    """Measure the README's models: PyTorch (eager), torch.compile, a rival and this package."""
    settings = Settings(rounds, seconds, threads=threads)
    writing = GenerationSettings(prompt=128, new=64, rounds=rounds, threads=threads)
    encoders = Session("benchmarks.headline", settings, out, record, "Beside rivals", run=harness.run)
    writers = Session(
        "benchmarks.headline",
        writing,
        out,
        record,
        "Text generation",
        run=generation_harness.run,
        show=generation_report,
    )
    rows = [encoder_row(encoders, workload, label) for workload, label in ENCODERS.items()]
    rows += writer_rows(writers, WRITER, writing)
    rows.append(graph_row(*GRAPH, rounds))
    headline = Session("benchmarks.headline", settings, out, record, GROUP)
    headline.keep(TITLE, COLUMNS, [row.cells for row in rows])
    best = [max(float(cell[:-1]) for cell in (row.cells[4], row.cells[6]) if cell != "-") for row in rows]
    headline.console.print(f"geometric mean of the best speedups: {statistics.geometric_mean(best):.2f}x")
    headline.close()


if __name__ == "__main__":
    typer.run(main)
