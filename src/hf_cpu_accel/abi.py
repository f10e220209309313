"""The ABI between Python and the kernels: enumerations by number, and structs whose numbers an op receives in order.

This file is its only description. `python -m tests.abi` writes csrc/abi.h from it. The kernels return the version that they were
built for, and `extension.status()` compares it with VERSION. To change the ABI, edit this file, run the command, and rebuild the
kernels.
"""

# Annotations are read as types, so they are not postponed.
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")

ACTIVATIONS = (
    *("none", "gelu", "gelu_tanh", "relu", "silu", "quick_gelu", "tanh", "relu2", "relu6", "hardswish"),
    *("leaky_relu", "leaky_relu_tenth"),
)
POINTWISE_ACTIVATIONS = (*ACTIVATIONS, "sigmoid", "hardsigmoid")
WEIGHT_KINDS = (
    *("float32", "bfloat16", "int8", "int8-weight", "int4", "int8-image", "affine4", "affine8"),
    "float32-rows",
)
NORM_KINDS = ("none", "layer_norm", "rms_norm")
NORM_SCOPES = ("head", "head with its own weights", "all heads")
GATE_ACTIVATIONS = ("none", "sigmoid", "softplus")
SCORINGS = ("softmax", "sigmoid")
RECURRENCE_KINDS = ("none", "short_convolution", "gated_delta_net", "state_space", "selective_scan")
STEP_KINDS = (
    *("convolution", "max pooling", "grouped", "mean", "sum", "product", "channels", "affine"),
    *("average pooling", "average pooling within"),
)
REDUCTIONS = ("sum", "mean", "min", "max")
AGGREGATES = ("sum", "mean", "min", "max", "var", "std")


@dataclass(frozen=True)
class Enumeration:
    """An `enum class` of C++. The number of a member is its position.

    Attributes:
        name: of the enumeration in C++.
        members: their names in Python; C++ has an underscore for each space and hyphen.
        counts: constants of C++ with numbers of members.
        names: the array of the members' names in C++, for those that ops receive as text; empty for none.
        comment: for C++.
    """

    name: str
    members: tuple[str, ...]
    counts: Mapping[str, int] = field(default_factory=dict)
    names: str = ""
    comment: str = ""


ENUMERATIONS = (
    Enumeration(
        "WeightKind",
        WEIGHT_KINDS,
        {"weight_kinds": len(WEIGHT_KINDS)},
        comment="int8_weight: the values of int8, with input in twice as many bits. int4: see gemm/int4.h; affine: gemm/affine.h.\n"
        "int8_image: of convolutions; the input becomes bytes by image, or is bytes already (convolution/quantize.h), in runs.\n"
        "float32_rows: not packed, see gemm/float_rows.h.",
    ),
    Enumeration(
        "Activation",
        POINTWISE_ACTIVATIONS,
        {"activations": len(ACTIVATIONS), "pointwise_activations": len(POINTWISE_ACTIVATIONS)},
        "activation_names",
        "sigmoid and hardsigmoid: of pixels (convolution/pointwise.h), not of products.",
    ),
    Enumeration("NormKind", NORM_KINDS, {"norm_kinds": len(NORM_KINDS)}),
    Enumeration("NormScope", NORM_SCOPES, {"norm_scopes": len(NORM_SCOPES)}),
    Enumeration(
        "GateActivation",
        GATE_ACTIVATIONS,
        {"gate_activations": len(GATE_ACTIVATIONS)},
        comment="none: no gate.",
    ),
    Enumeration("Scoring", SCORINGS, {"scorings": len(SCORINGS)}),
    Enumeration("RecurrenceKind", RECURRENCE_KINDS, {"recurrence_kinds": len(RECURRENCE_KINDS)}),
    Enumeration(
        "StepKind",
        STEP_KINDS,
        {"step_kinds": len(STEP_KINDS)},
        comment="What a step computes from its source.",
    ),
    Enumeration("Reduce", REDUCTIONS, names="reduce_names"),
    Enumeration(
        "Aggregate",
        AGGREGATES,
        {"aggregates": len(AGGREGATES)},
        "aggregate_names",
        "var is that of all the messages of a row (divided by their number); std is its root, and 0 where var is at most 1e-5.",
    ),
)


@dataclass(kw_only=True, eq=False)
class ProjectionLayout:
    """Indices of the packed weight and its scale in `weights`, and the first element of the bias in `vectors`; -1 for none."""

    weight: int
    scale: int
    bias: int


@dataclass(kw_only=True, eq=False)
class NormLayout:
    """A number of NORM_KINDS, and the first elements of two vectors; -1 for none."""

    kind: int
    weight: int
    bias: int


@dataclass(kw_only=True, eq=False)
class HeadsLayout:
    """Places in the output features of the qkv projection: see `ops.decoder.parts.Heads`."""

    first: int
    stride: int
    head_stride: int


@dataclass(kw_only=True, eq=False)
class RecurrenceLayout:
    """See `ops.decoder.parts.Recurrence`; vectors are first elements of `vectors`. All 0 for a layer with attention."""

    kind: int
    channels: int
    taps: int
    conv_weight: int
    conv_bias: int
    conv_input: int
    conv_gate: int
    gate: int
    decay: int
    beta: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    A_log: int
    dt_bias: int
    D: int
    norm_weight: int
    norm_groups: int
    gate_first: int
    rest: ProjectionLayout
    selected: ProjectionLayout
    steps: ProjectionLayout
    rest_features: int
    selected_features: int
    dt_norm: int
    B_norm: int
    C_norm: int


@dataclass(kw_only=True, eq=False)
class LayerLayout:
    """The integers of a layer of `decoder_layers`, a row of its argument `layout`.

    Vectors are the first element in `vectors`, -1 for none. cross_heads=0: no cross-attention. experts=0: no mixture. up and down
    of a mixture are those of its shared expert.
    """

    qkv: ProjectionLayout
    output: ProjectionLayout
    cross_query: ProjectionLayout
    cross_output: ProjectionLayout
    up: ProjectionLayout
    down: ProjectionLayout
    router: ProjectionLayout
    experts_up: ProjectionLayout
    experts_down: ProjectionLayout
    per_layer_gate: ProjectionLayout
    per_layer_output: ProjectionLayout
    attention_norm: NormLayout
    attention_post_norm: NormLayout
    attention_out_norm: NormLayout
    cross_norm: NormLayout
    cross_out_norm: NormLayout
    ffn_norm: NormLayout
    ffn_post_norm: NormLayout
    ffn_out_norm: NormLayout
    per_layer_post_norm: NormLayout
    query_norm: NormLayout
    key_norm: NormLayout
    value_norm: NormLayout
    attention_sub_norm: NormLayout
    ffn_sub_norm: NormLayout
    query_norm_scope: int
    key_norm_scope: int
    value_norm_scope: int
    attention_sub_norm_scope: int
    sinks: int
    alibi: int
    relative: int
    relative_count: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    query: HeadsLayout
    key: HeadsLayout
    value: HeadsLayout
    gate: HeadsLayout
    gate_dim: int
    gate_activation: int
    cross_heads: int
    cross_kv_heads: int
    cross_head_dim: int
    cross_value_dim: int
    window: int
    rotary: int
    rotary_dim: int
    rotary_interleaved: int
    shares_keys: int
    qkv_features: int
    intermediate_features: int
    gated: int
    activation: int
    parallel: int
    experts: int
    top_k: int
    expert_features: int
    experts_gated: int
    experts_activation: int
    scoring: int
    choice_bias: int
    renormalize: int
    shared_gate: int
    per_layer_input: int
    per_layer_features: int
    per_layer_activation: int
    recurrence: RecurrenceLayout


@dataclass(kw_only=True, eq=False)
class LayerScalars:
    """The floats of a layer of `decoder_layers`, a row of its argument `scalars`. A softcap of 0 means none."""

    attention_norm_eps: float
    attention_post_norm_eps: float
    attention_out_norm_eps: float
    cross_norm_eps: float
    cross_out_norm_eps: float
    ffn_norm_eps: float
    ffn_post_norm_eps: float
    ffn_out_norm_eps: float
    per_layer_post_norm_eps: float
    query_norm_eps: float
    key_norm_eps: float
    value_norm_eps: float
    attention_sub_norm_eps: float
    ffn_sub_norm_eps: float
    scale: float
    cross_scale: float
    softcap: float
    residual_scale: float
    output_scale: float
    experts_limit: float
    experts_scale: float
    recurrence_norm_eps: float


@dataclass(kw_only=True, eq=False)
class SidesLayout:
    """A number for the height of a window and one for its width."""

    rows: int
    columns: int


@dataclass(kw_only=True, eq=False)
class StepLayout:
    """A step of `convolutions`, a row of its argument `layout`: see `ops.chain.steps`.

    weight, scale, bias and range are indices of `parts`, source and residual those of images; -1 for none.
    """

    kind: int
    weight: int
    scale: int
    bias: int
    range: int
    source: int
    residual: int
    out_channels: int
    activation: int
    size: SidesLayout
    stride: SidesLayout
    padding: SidesLayout
    dilation: SidesLayout
    more: SidesLayout


# In C++, a struct follows those of its fields.
STRUCTS: tuple[type, ...] = (
    *(ProjectionLayout, NormLayout, HeadsLayout, RecurrenceLayout, LayerLayout, LayerScalars),
    *(SidesLayout, StepLayout),
)


def _numbers(struct: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and type of each number."""
    for name, kind in struct.__annotations__.items():
        if kind in (int, float):
            yield prefix + name, kind.__name__
        else:
            yield from _numbers(kind, f"{prefix}{name}.")


_COLUMNS = {struct: tuple(name for name, _ in _numbers(struct)) for struct in STRUCTS}
_GETTERS = {struct: attrgetter(*names) for struct, names in _COLUMNS.items()}


def columns(struct: type) -> tuple[str, ...]:
    """Return the names of the numbers of a struct in order, with a dot before those of an inner struct."""
    return _COLUMNS[struct]


def numbers(struct: object) -> tuple[Any, ...]:
    """Return the numbers of one of STRUCTS in order."""
    values: tuple[Any, ...] = _GETTERS[type(struct)](struct)
    return values


def read(struct: type[T], row: Sequence[float]) -> T:
    """Return the struct with the numbers of `row`, the reverse of `numbers`.

    Raises:
        ValueError: the row has more or fewer numbers.
    """
    if len(row) != len(columns(struct)):
        raise ValueError(f"{struct.__name__} has {len(columns(struct))} numbers, and the row {len(row)}")
    return _read(struct, iter(row))


def _read(struct: type[T], row: Iterator[float]) -> T:
    fields = struct.__annotations__.items()
    return struct(**{name: next(row) if kind in (int, float) else _read(kind, row) for name, kind in fields})


def version_of(enumerations: Iterable[Enumeration], structs: Iterable[type]) -> int:
    """Return a hash of the names, their order and types."""
    parts = [(part.name, part.members) for part in enumerations]
    fields = [(struct.__name__, tuple(_numbers(struct))) for struct in structs]
    return int(sha256(repr((parts, fields)).encode()).hexdigest()[:12], 16)


VERSION = version_of(ENUMERATIONS, STRUCTS)
