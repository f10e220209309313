"""`CPUAccelConfig`: the settings of `accelerate_for_cpu`, as a frozen dataclass that converts to and from JSON."""

from __future__ import annotations

import dataclasses
import json
import warnings
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
SPECULATE = ("auto", "off")
REORDER = ("none", "degree", "rcm")
PROVIDERS = ("auto", "own")

# dtypes that need calibration on examples. They apply to a whole model, not to single modules.
CALIBRATED_DTYPES = ("int8-static",)
STATIC_RANGES = ("min-max", "percentile", "squared-error")


@dataclass(frozen=True)
class CPUAccelConfig:
    """The settings of `accelerate_for_cpu`.

    Args:
        dtype: dtype of the packed weights and of the matrix products. Accumulation, norms and softmax are always float32.

            - `"auto"`: bfloat16 if the CPU computes it faster than float32, for models that generate, and for bfloat16 weights;
              or else float32.
            - `"float32"`, `"bfloat16"`.
            - `"int8"`: weights in int8 per output channel; activations are quantized to int8 per token at run time.
            - `"int8-weight"`: weights as for int8, activations in 16 bits.
            - `"int4"`: weights in 4 bits per group, activations as for int8.
            - `"int8-static"`: as int8, and images pass between convolutions in int8, with ranges from `calibration=`.
        dtypes: {module path or shell-style pattern: dtype} of modules with another dtype, including all modules below them. If
            several patterns match, the last one wins. Linears that share a packed weight (query, key and value) are packed
            separately if their dtypes differ.
        accuracy: a number between 0 and 1 that replaces `dtype`. Each layer gets the fastest dtype with which all rows of outputs
            have at least this cosine to the outputs of the eager model on the examples. For causal language models, the perplexity
            is at most `1 / accuracy` of the eager one instead. See `accelerate_for_cpu` for the examples.
        compile: has no effect. Layers of no known form are recorded and replayed with each value. `"now"` and `"background"`, which
            compiled them in earlier versions, are accepted with one warning. To compile a model, use
            `torch.compile(model, backend="hf_cpu_accel")`.
        threads: number of intra-op threads; None to choose it from affinity, cgroup quota and physical cores.
        skip_modules: module paths or shell-style patterns (`"*.pooler"`) of modules to leave as they are, including all modules
            below them.
        verify: how to compare replacements with the modules they replace.

            - `True`: compare on a small random input when accelerating. A module whose replacement differs is left as it is.
            - `"first"`: also compare the first call of each fused layer with its original forward. A layer that differs by more
              than the documented bounds runs its original forward from then on, with a warning. The comparison takes as long as
              one forward pass.
            - `False`: compare nothing.
        int4_group: group size of int4, the number of input features that share a scale: 32 (4.25 bits per weight), 64 or 128.
        head_dtype: dtype of the language modeling head: one of the dtypes, or `"auto"`: int8 for int4, or else as `dtype`.
        originals: where to store the original weights for `restore`, if packing loses information (all dtypes except float32).

            - `"disk"`: in the checkpoint if the weights are mapped from it unchanged, or else in a file that is deleted with the
              process.
            - `"memory"`: in memory.
            - `"drop"`: nowhere; `restore` raises an error.
        providers: which kernels to use for matrix products and convolutions.

            - `"auto"`: the oneDNN or BLAS of PyTorch for sizes for which it was measured to be more than 3 % faster, or else the
              kernels of this package.
            - `"own"`: only the kernels of this package; nothing is measured.
        padding: what fused layers compute for padding in a batch (for decoders only with left padding).

            - `"skip"`: nothing; hidden states at padding are zeros.
            - `"compute"`: hidden states of the padding like the original model.
        kv_cache: dtype of the KV cache of generated text.

            - `"float32"`, `"bfloat16"`.
            - `"int8"`: 8 bits, with a float32 scale per token and head.
            - `"auto"`: bfloat16 if the weights are packed in fewer than 32 bits and the attention is fused, or else the dtype of
              the model.
        speculate: whether `generate` may draft tokens that it was not asked to draft.

            - `"auto"`: it drafts what followed when the text last ended as it does now, where that pays, and where a token gets the
              same logits, bit for bit, as without drafts.
            - `"off"`: only with `prompt_lookup_num_tokens` or `assistant_model`.
        reorder: how to reorder the nodes of graphs; outputs keep the order of the caller. It helps graphs with a structure that
            their numbering does not reflect; measure before use.

            - `"none"`: do not reorder.
            - `"degree"`: nodes with most neighbors first.
            - `"rcm"`: reverse Cuthill-McKee; needs scipy.
        static_range: how to choose the ranges of images for `"int8-static"`: `"min-max"` of the values in the examples, the
            `"percentile"` that contains 99.99 % of them, or the range with the least `"squared-error"`.

    Raises:
        ValueError: a value that is not accepted.
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
    speculate: str = "auto"
    int4_group: int = 32
    head_dtype: str = "auto"
    reorder: str = "none"
    dtypes: Mapping[str, str] | tuple[tuple[str, str], ...] = ()
    accuracy: float | None = None
    static_range: str = "min-max"

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, (*DTYPES, *CALIBRATED_DTYPES))
        _check_choice("static_range", self.static_range, STATIC_RANGES)
        _check_choice("head_dtype", self.head_dtype, DTYPES)
        _check_choice("compile", self.compile, COMPILE)
        if self.compile in ("now", "background"):
            _warn_of_compile(self.compile)
        _check_choice("originals", self.originals, ORIGINALS)
        _check_choice("providers", self.providers, PROVIDERS)
        _check_choice("padding", self.padding, PADDING)
        _check_choice("kv_cache", self.kv_cache, KV_CACHES)
        _check_choice("speculate", self.speculate, SPECULATE)
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
        # JSON has no tuples, so lists are accepted. They are stored as tuples, for equality and hashing.
        object.__setattr__(self, "skip_modules", _as_patterns(self.skip_modules))
        object.__setattr__(self, "dtypes", _as_dtypes(self.dtypes))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON types."""
        fields = dataclasses.asdict(self)
        fields["skip_modules"] = list(self.skip_modules)
        fields["dtypes"] = [list(pair) for pair in self.dtypes]  # in a dict JSON would sort them
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> CPUAccelConfig:
        """Create a configuration from the result of `to_dict`.

        Raises:
            ValueError: a field that does not exist, or a value that is not accepted.
            TypeError: `fields` is not a mapping, or a value has the wrong type.
        """
        if not isinstance(fields, Mapping):
            raise TypeError(f"fields must be a mapping of {cls.__name__} fields, got {type(fields).__name__}")
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(fields) - set(names))
        if unknown:
            raise ValueError(f"unknown {cls.__name__} field {unknown[0]!r}, accepted: {', '.join(names)}")
        return cls(**fields)

    def to_json(self) -> str:
        """Return the fields as JSON text."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> CPUAccelConfig:
        """Create a configuration from the result of `to_json`.

        Raises:
            ValueError: text that is not JSON, a field that does not exist, or a value that is not accepted.
            TypeError: a value of the wrong type.
        """
        return cls.from_dict(json.loads(text))

    def save(self, directory: str | Path) -> Path:
        """Write `cpu_accel_config.json` to `directory`, which is created if needed, and return the path of the file."""
        path = Path(directory) / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json(), encoding="utf-8")
        return path

    @classmethod
    def load(cls, directory: str | Path) -> CPUAccelConfig:
        """Read `cpu_accel_config.json` from `directory`.

        Raises:
            FileNotFoundError: the directory has no such file.
            ValueError, TypeError: see `from_json`.
        """
        return cls.from_json((Path(directory) / FILE_NAME).read_text(encoding="utf-8"))


def resolve(config: CPUAccelConfig | None, **options: Any) -> CPUAccelConfig:
    """Return `config` (None for the defaults), overridden by the `options` that differ from their defaults.

    Raises:
        TypeError: `config` is not a `CPUAccelConfig`, or an option does not exist.
        ValueError: a value that is not accepted.
    """
    if config is None:
        config = CPUAccelConfig()
    elif not isinstance(config, CPUAccelConfig):
        raise TypeError(
            f"config is a {type(config).__name__}, expected a CPUAccelConfig; pass a dtype as dtype=..."
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


def _warn_of_compile(value: str) -> None:
    warnings.warn(
        f"compile={value!r} compiles nothing: layers of no known form are recorded and replayed, as with compile='auto'; "
        'to compile a model, use torch.compile(model, backend="hf_cpu_accel")',
        FutureWarning,  # shown once by default: the location is always this file
        stacklevel=2,
    )


def _check_threads(threads: object) -> None:
    if threads is None:
        return
    if isinstance(threads, bool) or not isinstance(threads, int):
        raise TypeError(
            f"threads={threads!r}: expected a positive integer, or None to choose for the machine"
        )
    if threads < 1:
        raise ValueError(f"threads={threads}: expected at least 1, or None to choose for the machine")


def _check_accuracy(accuracy: object, dtype: str) -> None:
    if accuracy is None:
        return
    if isinstance(accuracy, bool) or not isinstance(accuracy, int | float):
        raise TypeError(f"accuracy={accuracy!r}: expected a number between 0 and 1, such as 0.99, or None")
    if not 0 < accuracy < 1:
        raise ValueError(f"accuracy={accuracy!r}: expected more than 0 and less than 1, such as 0.99")
    if dtype != "auto":
        raise ValueError(
            f"accuracy={accuracy!r} chooses the dtypes, so dtype={dtype!r} is not accepted with it: leave dtype at 'auto'"
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
    return tuple(dict(reversed(pairs)).items())[::-1]  # the last of two equal patterns


def _as_patterns(patterns: object) -> tuple[str, ...]:
    if isinstance(patterns, str) or not isinstance(patterns, list | tuple | set | frozenset):
        raise TypeError(
            f"skip_modules={patterns!r}: expected a tuple of module paths, for example ('model.pooler',)"
        )
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"skip_modules contains {pattern!r}: expected module paths as strings")
    return tuple(sorted(patterns) if isinstance(patterns, set | frozenset) else patterns)
