"""`Choice`: the dtypes that were chosen for an accuracy, and what was measured with them."""

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
    """What `accuracy` has chosen for one model.

    Attributes:
        dtype, dtypes: of all layers (`"auto"` where nothing was chosen), and of those at these paths in the model another one.
        accuracy: what was asked for.
        measured: what these dtypes have, in the same measure.
        measure: `"cosine"` (the least one of any row of outputs) or `"perplexity"` (eager's by this one's); `"-"` where nothing was
            measured.
        examples: what it was measured on, in words.
        layers: {dtype: number of packed weights}.
        tries: how often the model was accelerated to find it.
        seconds: what that took.
        name: what the target calls the model, if it has several.
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
        """The inverse of `dataclasses.asdict`, also through JSON.

        Raises:
            KeyError, TypeError: other fields than these, or of other types.
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
            f"{asked}{'' if self.holds else ' is not reached'}: {layers}; {self.told()} on {self.examples}; "
            f"{self.tries} {'try' if self.tries == 1 else 'tries'}, {self.seconds:.1f} s"
        )

    def told(self) -> str:
        """The measured number in words."""
        if self.measure == COSINE:
            lost = 1 - self.measured
            cosine = f"1 - {lost:.1e}" if 0 < lost < 1e-4 else f"{self.measured:.5f}"
            return f"least cosine of an output row to eager's {cosine}"
        risen, allowed = 1 / self.measured - 1, 1 / self.accuracy - 1
        return f"perplexity {risen:+.2%} of eager's, allowed {allowed:+.2%}"
