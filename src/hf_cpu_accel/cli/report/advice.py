"""What to try next, from what was measured: each a sentence and the line of code that does it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hf_cpu_accel.cli.report.measure import Report

_CLOSE = 0.999  # cosine that most tasks do not notice
_FAR = 0.99


@dataclass(frozen=True)
class Advice:
    """A heading, why, and the code."""

    what: str
    why: str
    code: str


def advice(report: Report) -> list[Advice]:
    """The most useful first."""
    found = [_dtype(report), *_accuracy(report)]
    if report.plan.threads > 1:
        found.append(
            Advice(
                "many requests at a time",
                f"One call uses {report.plan.threads} threads. Several instances with fewer threads each answer more short "
                "requests per second, on the same packed weights.",
                f"InstancePool(model, instances={report.plan.threads}).map(items)",
            )
        )
        found.append(
            Advice(
                "fewer threads",
                f"{report.plan.thread_reason}. Small calls may be as fast on fewer.",
                f"accelerate_for_cpu(model, dtype={report.dtype!r}, threads={report.plan.threads // 2})",
            )
        )
    return found + _left(report)


def _dtype(report: Report) -> Advice:
    best = next(result for result in report.results if result.system == report.dtype)
    if best.slower:
        return Advice(
            "stay with eager",
            f"No dtype was faster on this call: the best, {report.dtype}, has {best.speedup.value:.2f}x of its speed.",
            "restore(model)",
        )
    cosine = best.agreement.worst_cosine
    why = f"{best.speedup.value:.2f}x as fast as eager float32, worst cosine of an output {cosine:.5f}"
    exact = [r for r in report.results[1:] if r.agreement.worst_cosine >= _CLOSE and not r.slower]
    code = f"accelerate_for_cpu(model, dtype={report.dtype!r})"
    if cosine < _CLOSE and exact:
        near = min(exact, key=lambda result: result.seconds.value)
        why += f"; {near.system} stays at {near.agreement.worst_cosine:.5f} with {near.speedup.value:.2f}x"
    return Advice(f"dtype: {report.dtype} was the fastest", f"{why}.", code)


def _accuracy(report: Report) -> list[Advice]:
    measured = [layer for layer in report.layers if layer.agreement is not None]
    worst = min(measured, key=lambda layer: layer.agreement.worst_cosine, default=None)  # type: ignore[union-attr]
    found = [
        Advice(
            "a budget instead of a dtype",
            "Dtypes are chosen layer by layer so that outputs stay this near to eager's, on examples of yours.",
            "accelerate_for_cpu(model, accuracy=0.99, examples=[...])",
        )
    ]
    if worst is not None and worst.agreement is not None and worst.agreement.worst_cosine < _FAR:
        why = f"{worst.path} alone has a worst cosine of {worst.agreement.worst_cosine:.4f}: keep it in float32."
        code = (
            f"accelerate_for_cpu(model, dtype={report.dtype!r}, dtypes={{{worst.path + '*'!r}: 'float32'}})"
        )
        found.append(Advice("one layer loses most", why, code))
    return found


def _left(report: Report) -> list[Advice]:
    reasons = Counter(item.reason for item in report.plan.left)
    if not reasons:
        return []
    reason, count = reasons.most_common(1)[0]
    why = f"{len(report.plan.left)} modules were left as they are; {count} of them because: {reason}"
    return [Advice("what was left", why, "print(explain(model))")]
