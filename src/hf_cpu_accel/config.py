"""`CPUAccelConfig`: what to do, as a frozen value that goes to JSON and back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE_NAME = "cpu_accel_config.json"

DTYPES = ("auto", "float32", "bfloat16", "int8", "int8-weight", "int4")
INT4_GROUPS = (32, 64, 128)
COMPILE = ("auto", "off", "now", "background")
ORIGINALS = ("disk", "memory", "drop")
PADDING = ("skip", "compute")
KV_CACHES = ("auto", "float32", "bfloat16", "int8")
REORDER = ("none", "degree", "rcm")
PROVIDERS = ("auto", "own")

# Those for which a model is run on examples first. They are of whole models, not of single modules.
CALIBRATED_DTYPES = ("int8-static",)
STATIC_RANGES = ("min-max", "percentile", "squared-error")


@dataclass(frozen=True)
class CPUAccelConfig:
    """How a model is accelerated.

    Args:
        dtype: the type of the packed weights and of the matrix products: `"float32"`, `"bfloat16"`, `"int8"` (weights per
            output channel, activations per token, at run time), `"int8-weight"` (the same weights, activations in 16
            bits), `"int4"` (4-bit weights in groups, activations as for int8), `"int8-static"` (as int8, and images pass in 8
            bits between convolutions, in ranges that `calibration=` shows) or `"auto"`: bfloat16 where the CPU computes
            it faster than float32, for models that generate, and for weights that are bfloat16 already; else float32.
            Accumulation, norms and softmax are float32 always.
        dtypes: {module path or shell-style pattern: dtype} of parts that are to be packed in another than `dtype`, with all that is
            below them; where several patterns match, the last one decides. Linears that would lie in one packed weight (query, key
            and value) are packed apart where theirs differ.
        accuracy: more than 0 and less than 1, instead of a dtype: the fastest dtype of each layer is chosen with which no row of
            outputs has a smaller cosine to the eager model's on the examples; of causal language models, with which their
            perplexity on the examples is at most `1 / accuracy` of the eager model's. See `accelerate_for_cpu` for the examples.
        compile: what is done with blocks that were not fused whole: `"background"`: a child process of lowest priority compiles
            them while the packed layers serve, and they are exchanged between two calls where the compiled form agrees and was
            faster; `"now"`: the first call waits for that; `"off"`: nothing; `"auto"` means off.
        compiled_bundle: a folder that `hf-cpu-accel compile --bundle` wrote: what `compile` would compile is looked for there, too.
        trust_compiled: must be True for `compiled_bundle`, which is machine code that runs as this process: say so only of a
            folder whose maker you trust.
        threads: the number of intra-op threads, or None to take it from affinity, cgroup quota and physical cores.
        skip_modules: module paths, or shell-style patterns of them (`"*.pooler"`), that are left alone with all
            that is below them.
        verify: compare each replacement with the module it replaces on a small random input, and leave the original in place
            where they differ. With `"first"` the first real call of each fused part is compared with its own forward, too, and
            a part that differs by more than is published goes back to that, with a warning; it takes as long as one forward.
            `True` does without that, and False compares nothing.
        int4_group: how many input features of an int4 weight share a multiplier: 32 (4.25 bits per weight), 64 or 128.
        head_dtype: of the linear that scores the words of a vocabulary: one of the dtypes, or `"auto"`: 8 bits for int4, else as
            `dtype` says.
        originals: where the weights wait for `restore` if packing loses information (all but float32): `"disk"` (in the
            checkpoint, if they are mapped from it as they are, else in a file that vanishes with the process), `"memory"`, or
            `"drop"` (`restore` is then refused).
        providers: `"auto"`: where torch's own oneDNN or BLAS was measured to be more than 3 % faster than our kernels, it
            serves; or `"own"`: our kernels always, and nothing is measured.

        padding: `"skip"`: fused layers compute the tokens of a padded batch only (decoders: one padded on the left), and what
            stands at the padding comes out as zeros; `"compute"`: hidden states of the padding too, as the original gives them.
        kv_cache: what the keys and values of generated text are stored in: `"float32"`, `"bfloat16"`, `"int8"` (8 bits per
            token and head, and a float32 for each vector), or `"auto"`: bfloat16 where the weights are packed narrower than
            float32 and the attention is ours, else as the model computes them.

        reorder: graph models are given their nodes in another order, and give their outputs in the caller's: `"degree"` (most
            neighbors first), `"rcm"` (reverse Cuthill-McKee, needs scipy), or `"none"`. For graphs with structure that their
            numbering does not show ("rcm" helped there, "degree" did not); measure before use.

        static_range: which range images in 8 bits have for `"int8-static"`: `"min-max"` of the examples' values, the
            `"percentile"` that 99.99 % of them lie in, or that of the least `"squared-error"`.

    Raises:
        ValueError: a value outside of the accepted ones.
        TypeError: a value of the wrong type.
    """

    dtype: str = "auto"
    compile: str = "auto"
    threads: int | None = None
    skip_modules: tuple[str, ...] = ()
    verify: bool | str = "first"
    originals: str = "disk"
    providers: str = "auto"
    padding: str = "skip"
    kv_cache: str = "auto"
    int4_group: int = 32
    head_dtype: str = "auto"
    reorder: str = "none"
    compiled_bundle: str | None = None
    trust_compiled: bool = False
    dtypes: Mapping[str, str] | tuple[tuple[str, str], ...] = ()
    accuracy: float | None = None
    static_range: str = "min-max"

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, (*DTYPES, *CALIBRATED_DTYPES))
        _check_choice("static_range", self.static_range, STATIC_RANGES)
        _check_choice("head_dtype", self.head_dtype, DTYPES)
        _check_choice("compile", self.compile, COMPILE)
        _check_choice("originals", self.originals, ORIGINALS)
        _check_choice("providers", self.providers, PROVIDERS)
        _check_choice("padding", self.padding, PADDING)
        _check_choice("kv_cache", self.kv_cache, KV_CACHES)
        _check_choice("reorder", self.reorder, REORDER)
        _check_threads(self.threads)
        _check_accuracy(self.accuracy, self.dtype)
        if self.int4_group not in INT4_GROUPS or isinstance(self.int4_group, bool):
            raise ValueError(
                f"int4_group={self.int4_group!r}: accepted are {', '.join(map(str, INT4_GROUPS))}"
            )
        if not isinstance(self.verify, bool | str):
            raise TypeError(f'verify={self.verify!r}: expected True, False or "first"')
        if isinstance(self.verify, str) and self.verify != "first":
            raise ValueError(f'verify={self.verify!r}: accepted are True, False and "first"')
        if not isinstance(self.trust_compiled, bool):
            raise TypeError(f"trust_compiled={self.trust_compiled!r}: expected True or False")
        if self.compiled_bundle is not None:
            _check_bundle(self.compiled_bundle, self.trust_compiled)
            object.__setattr__(self, "compiled_bundle", str(self.compiled_bundle))
        # JSON has no tuples, so lists are taken and stored as tuples: equality and hashing depend on it.
        object.__setattr__(self, "skip_modules", _as_patterns(self.skip_modules))
        object.__setattr__(self, "dtypes", _as_dtypes(self.dtypes))

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON types."""
        fields = dataclasses.asdict(self)
        fields["skip_modules"] = list(self.skip_modules)
        fields["dtypes"] = [list(pair) for pair in self.dtypes]  # in a dict JSON would sort them
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> CPUAccelConfig:
        """The inverse of `to_dict`.

        Raises:
            ValueError: a field that does not exist, or a value that is not accepted.
            TypeError: `fields` is not a mapping.
        """
        if not isinstance(fields, Mapping):
            raise TypeError(f"fields must be a mapping of {cls.__name__} fields, got {type(fields).__name__}")
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise ValueError(f"unknown {cls.__name__} field {unknown[0]!r}, accepted: {', '.join(known)}")
        return cls(**fields)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> CPUAccelConfig:
        return cls.from_dict(json.loads(text))

    def save(self, directory: str | Path) -> Path:
        """Write `cpu_accel_config.json` into `directory` (created if needed) and return its path."""
        path = Path(directory) / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json(), encoding="utf-8")
        return path

    @classmethod
    def load(cls, directory: str | Path) -> CPUAccelConfig:
        """Read `cpu_accel_config.json` from `directory`.

        Raises:
            FileNotFoundError: there is none.
        """
        return cls.from_json((Path(directory) / FILE_NAME).read_text(encoding="utf-8"))


def resolve(config: CPUAccelConfig | None, **options: Any) -> CPUAccelConfig:
    """`config` (None for the defaults), overridden by the `options` that are not at their defaults.

    Raises:
        TypeError: `config` is something else, or an option does not exist.
        ValueError: a value that is not accepted.
    """
    if config is None:
        config = CPUAccelConfig()
    elif not isinstance(config, CPUAccelConfig):
        raise TypeError(
            f"config is a {type(config).__name__}, expected a CPUAccelConfig; a dtype goes in dtype=..."
        )
    defaults = {field.name: field.default for field in dataclasses.fields(CPUAccelConfig)}
    unknown = sorted(set(options) - set(defaults))
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}, accepted: {', '.join(defaults)}")
    return dataclasses.replace(config, **{k: v for k, v in options.items() if v != defaults[k]})


def _check_choice(name: str, value: object, accepted: tuple[str, ...]) -> None:
    quoted = ", ".join(repr(choice) for choice in accepted)
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r}: expected a string, one of {quoted}")
    if value not in accepted:
        raise ValueError(f"{name}={value!r} is unknown, accepted: {quoted}")


def _check_bundle(bundle: object, trusted: bool) -> None:
    if not isinstance(bundle, str | Path):
        raise TypeError(f"compiled_bundle={bundle!r}: expected the path of a folder")
    if not Path(bundle).is_dir():
        raise ValueError(f"compiled_bundle={str(bundle)!r}: there is no such folder")
    if not trusted:
        raise ValueError(
            f"compiled_bundle={str(bundle)!r} holds machine code that would run as this process: "
            "pass trust_compiled=True if you trust who made it"
        )


def _check_threads(threads: object) -> None:
    if threads is None:
        return
    if isinstance(threads, bool) or not isinstance(threads, int):
        raise TypeError(f"threads={threads!r}: expected a positive integer, or None to choose by the machine")
    if threads < 1:
        raise ValueError(f"threads={threads}: expected at least 1, or None to choose by the machine")


def _check_accuracy(accuracy: object, dtype: str) -> None:
    if accuracy is None:
        return
    if isinstance(accuracy, bool) or not isinstance(accuracy, int | float):
        raise TypeError(f"accuracy={accuracy!r}: expected a number between 0 and 1, such as 0.99, or None")
    if not 0 < accuracy < 1:
        raise ValueError(f"accuracy={accuracy!r}: expected more than 0 and less than 1, such as 0.99")
    if dtype != "auto":
        raise ValueError(
            f"accuracy={accuracy!r} chooses the dtypes, and dtype={dtype!r} was given, too: leave it at 'auto'"
        )


def _as_dtypes(dtypes: object) -> tuple[tuple[str, str], ...]:
    pairs = tuple(dtypes.items()) if isinstance(dtypes, Mapping) else dtypes
    if not isinstance(pairs, list | tuple) or any(
        not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str) for pair in pairs
    ):
        raise TypeError(
            f"dtypes={dtypes!r}: expected a dict of module paths and dtypes, for example {{'*.pooler': 'float32'}}"
        )
    for pattern, dtype in pairs:
        _check_choice(f"dtypes[{pattern!r}]", dtype, DTYPES[1:])
    return tuple(dict(reversed(pairs)).items())[::-1]  # of two that are alike the last one


def _as_patterns(patterns: object) -> tuple[str, ...]:
    if isinstance(patterns, str) or not isinstance(patterns, list | tuple | set | frozenset):
        raise TypeError(
            f"skip_modules={patterns!r}: expected a tuple of module paths, for example ('model.pooler',)"
        )
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"skip_modules holds {pattern!r}: expected module paths as strings")
    return tuple(sorted(patterns) if isinstance(patterns, set | frozenset) else patterns)
