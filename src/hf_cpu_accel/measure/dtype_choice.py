"""`Choice`: the dtypes chosen for an accuracy, and the measurements of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

COSINE, PERPLEXITY, NOTHING = "cosine", "perplexity", "-"
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("dtype", "measure", "examples", "name"), str),
    **dict.fromkeys(("accuracy", "measured", "seconds"), (int, float)),
    "layers": dict,
    "tries": int,
}


@dataclass(frozen=True)
class Choice:
    """The dtypes that `accuracy` has chosen for one model.

    Attributes:
        dtype: the dtype of all layers, `"auto"` if none was chosen.
        dtypes: (path, dtype) of layers with another dtype.
        accuracy: the requested accuracy.
        measured: the accuracy with these dtypes, in the same measure.
        measure: `"cosine"` (the smallest one of any row of outputs), `"perplexity"` (of eager, divided by that of this model), or
            `"-"` if nothing was measured.
        examples: the examples of the measurement, as text.
        layers: {dtype: number of packed weights}.
        tries: how often the model was accelerated to find the dtypes.
        seconds: the time of the search.
        name: the name of the model in a target with several models.
    """

    dtype: str
    dtypes: tuple[tuple[str, str], ...]
    accuracy: float
    measured: float
    measure: str
    examples: str
    layers: dict[str, int] = field(hash=False)
    tries: int
    seconds: float = field(compare=False)
    name: str = ""

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Choice:
        """Return the choice of fields from `dataclasses.asdict`, also after JSON.

        Raises:
            KeyError, TypeError: a field is missing, unknown, or of another type.
        """
        choice = cls(**{**fields, "dtypes": tuple((path, dtype) for path, dtype in fields["dtypes"])})
        for name, kind in _KINDS.items():
            if not isinstance(getattr(choice, name), kind):
                raise TypeError(
                    f"{name}={getattr(choice, name)!r}: expected {getattr(kind, '__name__', 'a number')}"
                )
        return choice

    @property
    def holds(self) -> bool:
        return self.measure == NOTHING or self.measured >= self.accuracy

    def __str__(self) -> str:
        asked = f"{self.name}: accuracy={self.accuracy!r}" if self.name else f"accuracy={self.accuracy!r}"
        if self.measure == NOTHING:
            return f"{asked}: {self.examples}"
        layers = ", ".join(f"{count} in {dtype}" for dtype, count in self.layers.items())
        return (
            f"{asked}{'' if self.holds else ' is not reached'}: {layers}; {self.measured_text()} on {self.examples}; "
            f"{self.tries} {'try' if self.tries == 1 else 'tries'}, {self.seconds:.1f} s"
        )

    def measured_text(self) -> str:
        """Return the measured number as text."""
        if self.measure == COSINE:
            lost = 1 - self.measured
            cosine = f"1 - {lost:.1e}" if 0 < lost < 1e-4 else f"{self.measured:.5f}"
            return f"least cosine of an output row to eager's {cosine}"
        risen, allowed = 1 / self.measured - 1, 1 / self.accuracy - 1
        return f"perplexity {risen:+.2%} of eager's, allowed {allowed:+.2%}"
