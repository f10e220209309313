"""Advice from the results of a report: each with a reason and a line of code."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hf_cpu_accel.cli.report.measure import Report

_CLOSE = 0.999  # a cosine that changes nothing in most tasks
_FAR = 0.99


@dataclass(frozen=True)
class Advice:
    """A heading, the reason, and the code."""

    heading: str
    reason: str
    code: str


def advice(report: Report) -> list[Advice]:
    """Return the advice for a report, the most useful first."""
    result = [_dtype(report), *_accuracy(report)]
    if report.plan.threads > 1:
        result.append(
            Advice(
                "Use instances for many short requests",
                f"One call uses {report.plan.threads} threads. Several instances with fewer threads each serve more short "
                "requests per second with the same packed weights.",
                f"InstancePool(model, instances={report.plan.threads}).map(items)",
            )
        )
        result.append(
            Advice(
                "Try fewer threads",
                f"Threads: {report.plan.thread_reason}. Small calls may be as fast with fewer threads.",
                f"accelerate_for_cpu(model, dtype={report.dtype!r}, threads={report.plan.threads // 2})",
            )
        )
    return result + _left(report)


def _dtype(report: Report) -> Advice:
    best = next(result for result in report.results if result.system == report.dtype)
    if best.slower:
        return Advice(
            "Keep PyTorch (eager)",
            f"No dtype was faster on this call. The fastest, {report.dtype}, has a speedup of {best.speedup.value:.2f}x.",
            "restore(model)",
        )
    cosine = best.agreement.worst_cosine
    reason = f"Speedup {best.speedup.value:.2f}x over eager float32; worst cosine of an output {cosine:.5f}"
    exact = [r for r in report.results[1:] if r.agreement.worst_cosine >= _CLOSE and not r.slower]
    code = f"accelerate_for_cpu(model, dtype={report.dtype!r})"
    if cosine < _CLOSE and exact:
        near = min(exact, key=lambda result: result.seconds.value)
        reason += f". {near.system} has a cosine of {near.agreement.worst_cosine:.5f} and a speedup of {near.speedup.value:.2f}x"
    return Advice(f"Use {report.dtype}, the fastest dtype", f"{reason}.", code)


def _accuracy(report: Report) -> list[Advice]:
    measured = [layer for layer in report.layers if layer.agreement is not None]
    worst = min(measured, key=lambda layer: layer.agreement.worst_cosine, default=None)  # type: ignore[union-attr]
    result = [
        Advice(
            "Set an accuracy instead of a dtype",
            "The dtype of each layer is chosen so that the outputs for your examples stay this close to eager.",
            "accelerate_for_cpu(model, accuracy=0.99, examples=[...])",
        )
    ]
    if worst is not None and worst.agreement is not None and worst.agreement.worst_cosine < _FAR:
        reason = f"{worst.path} has the lowest cosine of all layers, {worst.agreement.worst_cosine:.4f}."
        code = (
            f"accelerate_for_cpu(model, dtype={report.dtype!r}, dtypes={{{worst.path + '*'!r}: 'float32'}})"
        )
        result.append(Advice("Keep the least accurate layer in float32", reason, code))
    return result


def _left(report: Report) -> list[Advice]:
    reasons = Counter(item.reason for item in report.plan.left)
    if not reasons:
        return []
    reason, count = reasons.most_common(1)[0]
    text = f"{len(report.plan.left)} modules were left as they are. The most frequent reason, {count} times: {reason}"
    return [Advice("See why modules were left", text, "print(explain(model))")]
