"""The dtypes of a model and of its modules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from hf_cpu_accel.packing.linear import FORMS, QUANTIZED
from hf_cpu_accel.plan import Plan
from hf_cpu_accel.rewrite.core.packed_module import PackedModule

_WILD = frozenset("*?[")
_REPEATED = re.compile(r"(^|\.)\d+(\.|$)")  # a number in the path: one of several alike


class DtypeTable:
    """Dtypes of modules by path or pattern.

    Args:
        pairs: (path or shell-style pattern, dtype). Each applies to the modules that match it and to all modules below them. If
            several match, the last one wins.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._pairs = tuple(pairs)
        entries = [(pattern, (place, dtype)) for place, (pattern, dtype) in enumerate(self._pairs)]
        # Of paths there may be one for each layer, of patterns there are a few.
        self._paths = {path: entry for path, entry in entries if not _WILD & set(path)}
        self._patterns = [(pattern, entry) for pattern, entry in entries if _WILD & set(pattern)]

    def followed_by(self, pairs: Iterable[tuple[str, str]]) -> DtypeTable:
        """Return a table with further pairs at the end."""
        return DtypeTable((*self._pairs, *pairs))

    def of(self, path: str) -> str | None:
        """Return the dtype of the module at `path`, or None if no pair matches."""
        if not self._paths and not self._patterns:
            return None
        prefixes = prefixes_of(path)
        found = [self._paths[prefix] for prefix in prefixes if prefix in self._paths]
        found += [entry for p, entry in self._patterns if any(fnmatchcase(prefix, p) for prefix in prefixes)]
        return max(found)[1] if found else None


class Dtypes:
    """The dtypes of a model and of its modules.

    Args:
        root: the model.
        plan: its resolved settings, with the dtypes that were chosen for an accuracy.
        name: the name of the model in a target with several models; settings give dtypes to paths in the target.

    Attributes:
        of_model: one of `packing.DTYPES`, for modules without their own.
    """

    def __init__(self, root: nn.Module, plan: Plan, name: str) -> None:
        assert plan.config is not None
        self.of_model, self._name, self._head_dtype = plan.dtype, name, plan.config.head_dtype
        self._requested = DtypeTable(dict(plan.config.dtypes).items())
        self._chosen = DtypeTable(plan.chosen_dtypes)
        # If linears repeat in numbered layers, those outside of them are heads.
        self._has_layers = any(
            isinstance(module, nn.Linear) and _REPEATED.search(path) for path, module in root.named_modules()
        )

    def choose(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Give modules at paths in the model other dtypes."""
        self._chosen = self._chosen.followed_by(pairs)

    def own(self, path: str) -> str | None:
        """Return the dtype that settings give to the module at `path`, or None if it has the dtype of the model."""
        return self._requested.of(f"{self._name}.{path}") or self._chosen.of(path)

    def at(self, path: str) -> str:
        """Return the dtype of the module at `path`, of any kind."""
        return self.own(path) or self.of_model

    def inside(self, path: str, module: nn.Module) -> set[str]:
        """Return the dtypes of the linears and packed modules in `module`, which is at `path`."""
        inside = (name for name, part in module.named_modules() if isinstance(part, nn.Linear | PackedModule))
        return {self.at(f"{path}.{name}") for name in inside} or {self.at(path)}

    def names(self, path: str, module: nn.Module) -> str:
        """Return the dtypes `inside` a module joined for the plan."""
        inside = self.inside(path, module)
        return " + ".join(dtype for dtype in FORMS if dtype in inside)

    def of_weight(self, path: str, linears: Sequence[nn.Linear]) -> str:
        """Return the dtype that `linears`, at or below `path`, are packed in.

        Integers are for linears that repeat in each layer, and for heads with a large vocabulary, which take most of the time. A
        pooler or a head for a few classes costs little and its error goes straight into the output, so it stays float32. With
        int4 a head has 8 bits unless `config.head_dtype` differs: in 4 bits it caused a sixth of the error of a small language
        model. A dtype that settings give to a module by name always wins.
        """
        own = self.own(path)
        if own is not None:
            return own
        is_head = self._has_layers and not _REPEATED.search(path)
        is_small = all(linear.out_features <= linear.in_features for linear in linears)
        if not is_head:
            return self.of_model
        if self.of_model in QUANTIZED and is_small:
            return "float32"
        if self._head_dtype != "auto":
            return self._head_dtype
        return "int8" if self.of_model == "int4" else self.of_model


def prefixes_of(path: str) -> list[str]:
    """Return `path` and the paths of the modules above it, without the root: "a", "a.b" and "a.b.c" for "a.b.c"."""
    parts = [part for part in path.split(".") if part]
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def coarsest(dtypes: Iterable[str]) -> str:
    """Return the dtype that rounds most, or "float32" without any."""
    return max(dtypes, key=FORMS.index, default="float32")
