"""A small config of any model type, from its own default config: rules on the names of its fields, and a few ways to apply them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

VOCABULARY = 200
_EXCEPTIONS = Path(__file__).with_name("exceptions.json")

_IDS = re.compile(r"(_id|_ids|_index|_token)$")
_LAYERS = re.compile(r"(layers?|depths?|num_blocks|blocks|n_layer)$")
_KEY_HEADS = re.compile(r"(key_value_heads|num_kv_heads|n_head_kv|kv_heads|num_key_value)")
_HEADS = re.compile(r"(heads?|n_head)$")
_HEAD_SIZES = re.compile(r"(head_dim|d_kv|kv_channels|head_size|d_head|attention_head_dim|dim_head)$")
_INNER = re.compile(r"(intermediate|ffn|mlp_dim|mlp_hidden|feed_?forward|d_ff|inner|ff_dim|expansion_dim)")
CHOSEN = re.compile(r"(experts_per_tok|top_?k|selected|per_token|^moe_k$)")
_EXPERTS = re.compile(r"experts?$|num_expert")
_POSITIONS = re.compile(
    r"(max_.*position|n_positions|max_source|max_target|max_seq|context_length|seq_length)"
)
_QUERIES = re.compile(r"(num_queries|query_tokens|num_latents|num_query)")
_IMAGES = re.compile(r"(image_size|img_size|input_size|image_height|image_width|crop_size)$")
_WIDTHS = re.compile(
    r"(hidden|d_model|n_embd|embed|dim|width|channels|units|features|_size|embedding)(_?size|_?dim|s|_?ratio)?$"
)
_DERIVED = ("out_features", "out_indices", "stage_names", "transformers_version", "architectures", "_name_or_path",
            "id2label", "label2id", "dtype", "per_layer_config")  # fmt: skip
_DEPTH = "(depth)"  # how many layers, as a field of its own while a config is made small
_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth")


@cache
def exceptions() -> dict[str, dict[str, Any]]:
    """{type: {"set": {path of a field: value}, "inputs": {name: see `inputs.py`}, "class": name, "why": a reason not to try,
    "chosen": outputs that follow from a choice (a length, keypoints) which rounding may change, so that float32 alone compares
    them, "generates": why the text that it writes is not compared}}, where one is needed."""
    given: dict[str, dict[str, Any]] = json.loads(_EXCEPTIONS.read_text())
    return given


def small_configs(model_type: str) -> Iterator[tuple[str, PretrainedConfig]]:
    """(how it was made, config), to be tried in this order; what its own checks refuse is left out."""
    config_class = CONFIG_MAPPING[model_type]
    given = exceptions().get(model_type, {}).get("set", {})
    yield from _small(config_class, lambda: _fields(config_class, given), given)


def smaller(config: PretrainedConfig) -> Iterator[tuple[str, PretrainedConfig]]:
    """Yield (how it was made, a small config with the options of `config`)."""
    return _small(type(config), lambda: _json(config), {})


def _small(
    config_class: type[PretrainedConfig], fields: Callable[[], dict[str, Any]], given: dict[str, Any]
) -> Iterator[tuple[str, PretrainedConfig]]:
    failure: Exception | None = None
    made = 0
    for name, recipe in _RECIPES.items():
        try:
            config = config_class(**_set(recipe(fields()), given))
        except Exception as error:
            failure = error
            continue
        made += 1
        yield name, config
    if not made and failure is not None:
        raise failure


def _fields(config_class: type[PretrainedConfig], given: dict[str, Any]) -> dict[str, Any]:
    for values in ({}, _set({}, given)):
        try:
            default = config_class(**values)
        except Exception:
            continue
        return _json(default)
    return {}


def _json(config: PretrainedConfig) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return fields


def _set(fields: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    for path, value in given.items():
        *above, name = path.split(".")
        inner = fields
        for part in above:
            inner = inner.setdefault(part, {})
        if value == "-":
            inner.pop(name, None)
        else:
            inner[name] = value
    return fields


def _fixed(fields: dict[str, Any]) -> dict[str, Any]:
    """Widths of 64, four heads of 16."""
    return _walk(fields, lambda name, value, near: _number(name, value, near, None))


def _divided(by: int) -> Any:
    """All widths divided, so that what fitted still fits; heads stay as many as they are."""
    return lambda fields: _walk(fields, lambda name, value, near: _number(name, value, near, by))


def _walk(fields: dict[str, Any], number: Any, taken: list[int] | None = None) -> dict[str, Any]:
    taken = [] if taken is None else taken
    small: dict[str, Any] = {}
    layers = _few_layers(fields)
    for name, value in fields.items():
        if name in _DERIVED or name == _DEPTH:
            continue
        if name in layers:
            small[name] = layers[name]
            continue
        if isinstance(value, dict) and value.get("model_type") == "timm_backbone":
            small[name] = _backbone(value)
        elif isinstance(value, dict):
            is_config = "model_type" in value or name.endswith("config")
            small[name] = (
                _walk(value, number, taken) if is_config else _table(name, value, number is not None)
            )
        elif _IDS.search(name) and not CHOSEN.search(name):
            small[name] = (
                [_token(v, taken) for v in value] if isinstance(value, list) else _token(value, taken)
            )
        elif isinstance(value, list) and value and all(type(v) is int for v in value):
            small[name] = _list(name, value, number, fields)
        else:
            value = VOCABULARY if value is None and name == "vocab_size" else value
            small[name] = number(name, value, fields) if type(value) is int else value
    return small


def _backbone(timm: dict[str, Any]) -> dict[str, Any]:
    """A ResNet that gives as many maps as the one of timm, which is not installed."""
    wanted = timm.get("out_indices") or [4]
    stages = [f"stage{number}" for number in range(5 - len(wanted), 5)]
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}
    return {"model_type": "resnet", **sizes, "out_features": stages}


def _few_layers(fields: dict[str, Any]) -> dict[str, Any]:
    """Where lists tell the kind of each layer: one layer of each kind, and as many in number."""
    counts = [(name, fields[name]) for name in _COUNTS if type(fields.get(name)) is int and fields[name] > 2]
    for count_name, count in counts:
        lists = {
            n: v for n, v in fields.items() if isinstance(v, list) and len(v) == count and n not in _DERIVED
        }
        if not any("type" in n or "pattern" in n for n in lists):
            continue
        kinds = list(zip(*(map(str, v) for v in lists.values()), strict=True))
        chosen = sorted({kind: i for i, kind in reversed(list(enumerate(kinds)))}.values())[:6]
        chosen = chosen if len(chosen) > 1 else [0, 1]
        return {count_name: len(chosen), **{n: [v[i] for i in chosen] for n, v in lists.items()}}
    return {}


def _table(name: str, value: dict[str, Any], shrink: bool) -> dict[str, Any]:
    """Rotary sections are shares of half a head."""
    if "mrope_section" not in value or not value["mrope_section"]:
        return value
    sections = value["mrope_section"]
    total = sum(sections)
    parts = [max(1, section * 8 // total) for section in sections]
    parts[0] += 8 - sum(parts)
    return {**value, "mrope_section": parts}


def _token(value: Any, taken: list[int]) -> Any:
    """Ids beyond the vocabulary are moved to its end, each to a place of its own."""
    if type(value) is not int or value < VOCABULARY - 30:
        return value
    taken.append(value)
    unique = list(dict.fromkeys(taken))
    return VOCABULARY - 1 - unique.index(value) % 30


def _list(name: str, value: list[int], number: Any, near: dict[str, Any]) -> list[int]:
    if _LAYERS.search(name) and "index" not in name:
        return [min(v, 2) for v in value] if max(value) < 64 else value
    if _HEADS.search(name):
        if len(set(value)) > 1:
            return [2**i for i in range(len(value))]
        return [min(v, 4) for v in value]
    if _IMAGES.search(name):
        return [32] * len(value)
    if re.search(r"(hidden_sizes|channels|dims?|embed|widths?|sizes|filters)$", name) and min(value) >= 16:
        if len(set(value)) == 1:
            return [32] * len(value)
        return [max(8, v * 16 // min(value) // 8 * 8) for v in value]
    return value


def _number(name: str, value: int, near: dict[str, Any], by: int | None) -> int:
    if "vocab" in name and value > VOCABULARY:
        return VOCABULARY
    if value < 2:
        return value
    if _LAYERS.search(name) and "feat" not in name and "index" not in name:
        return min(value, near.get(_DEPTH, 2))
    if name in ("n_group", "topk_group", "n_groups", "moe_n_group", "num_expert_group", "num_limited_groups"):
        return 1
    if _EXPERTS.search(name) and not CHOSEN.search(name):
        return min(value, 4)
    if CHOSEN.search(name):
        return min(value, 2)
    if _POSITIONS.search(name):
        return min(value, 128)
    if _QUERIES.search(name):
        return min(value, 10)
    if name in ("sliding_window", "attention_window", "local_attention"):
        return min(value, 8)
    if _IMAGES.search(name):
        return min(value, 32)
    if name in ("patch_size", "tubelet_size") and value > 8:
        return 8
    if by is not None:
        wide = _WIDTHS.search(name) or _INNER.search(name) or _HEAD_SIZES.search(name)
        return value // by if wide and value % by == 0 and value > 2 * by and value >= 32 else value
    return _fixed_number(name, value, near)


def _fixed_number(name: str, value: int, near: dict[str, Any]) -> int:
    if _KEY_HEADS.search(name):
        return 4 if value == near.get("num_attention_heads") else min(value, 2)
    if _HEADS.search(name):
        return min(value, 4)
    if name == "head_dim" and "qk_rope_head_dim" in near:
        return 8
    if "rope_head_dim" in name:
        return 16 if "nope" in name else 8
    if _HEAD_SIZES.search(name):
        return min(value, 16)
    if "rank" in name:
        return min(value, 32)
    if _INNER.search(name) or (name == "hidden_dim" and "dim" in near):
        return min(value, 96)
    return 64 if _WIDTHS.search(name) and value > 64 else value


def _with_sections(fields: dict[str, Any]) -> dict[str, Any]:
    """`_fixed`, with the rotary sections of images and video, which some models take for granted."""
    small = _fixed(fields)
    _add_sections(small)
    return small


def _add_sections(fields: dict[str, Any]) -> None:
    for part in fields.values():
        if isinstance(part, dict):
            _add_sections(part)
    if "rope_parameters" in fields and "num_attention_heads" in fields:
        fields["rope_parameters"] = {**(fields["rope_parameters"] or {}), "mrope_section": [2, 3, 3]}


def _deeper(layers: int) -> Any:
    """`_fixed` with more layers, where a pattern of layers comes around after so many."""
    return lambda fields: _walk({**fields, _DEPTH: layers}, lambda n, v, near: _number(n, v, near, None))


_RECIPES: dict[str, Any] = {
    "fixed": _fixed,
    "rotary sections": _with_sections,
    "four layers": _deeper(4),
    "eight layers": _deeper(8),
    "an 8th": _divided(8),
    "a 16th": _divided(16),
    "a 4th": _divided(4),
    "a 32nd": _divided(32),
    "shallow": _divided(1 << 40),
    "own": lambda fields: {},
}
