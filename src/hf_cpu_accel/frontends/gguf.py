"""GGUF files: load their weights in blocks with transformers, so that the blocks are packed directly.

transformers loads blocks only if a kernel for the device is published, and for a few architectures. During a load, this module
registers a kernel for the CPU and further architectures. The kernel is plain PyTorch, for modules that are left and for restored
models. The conversions are those of the older loader of transformers, which dequantizes all weights.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.checkpoints.gguf import FORMATS
from hf_cpu_accel.frontends.gguf_types import all_block_types
from hf_cpu_accel.runtime.context import within
from hf_cpu_accel.runtime.fork import new_reentrant_lock

SUFFIX = ".gguf"


# Whether the current load keeps weights in blocks.
_keeps_blocks: ContextVar[bool] = ContextVar("keeps_blocks", default=False)
_one_at_a_time = new_reentrant_lock()  # the table of architectures belongs to transformers


class TorchKernel:
    """The kernel for products with weights in blocks, in plain PyTorch, with the interface of the published kernels."""

    def supports(self, ggml_type: int) -> bool:
        """Return whether weights of this type stay in blocks: in loads of this package, if the type can be packed."""
        return _keeps_blocks.get() and ggml_type in FORMATS

    @staticmethod
    def mul_mat_vec(weight: Tensor, x: Tensor, ggml_type: int, out_features: int) -> Tensor:
        """Compute x @ weight^T, [M, in_features] -> [M, out_features], in float32."""
        from transformers.integrations.gguf.dequant import dequantize

        return x.float() @ dequantize(weight, ggml_type).view(out_features, -1).T

    @staticmethod
    def mul_mat_id(weight: Tensor, x: Tensor, ids: Tensor, ggml_type: int, out_features: int) -> Tensor:
        """Multiply row i of x [tokens, in_features] by experts ids[i] -> [tokens, experts per token, out_features], in float32."""
        from transformers.integrations.gguf.dequant import dequantize

        output = torch.empty(*ids.shape, out_features)
        for expert in ids.unique().tolist():
            token, place = (ids == expert).nonzero(as_tuple=True)
            values = dequantize(weight[expert], ggml_type).view(out_features, -1)
            output[token, place] = x[token].float() @ values.T
        return output


_KERNEL = TorchKernel()


def split_path(name: object) -> tuple[str, str] | None:
    """Return (folder, file name) of the path of a GGUF file; None for other names."""
    path = Path(name) if isinstance(name, str | Path) else None
    if path is None or path.suffix != SUFFIX or not path.is_file():
        return None
    return str(path.parent), path.name


def located(source: str) -> tuple[str, dict[str, str]]:
    """Return the name and options for `from_pretrained`: for the path of a GGUF file its folder and `gguf_file`."""
    file = split_path(source)
    return (source, {}) if file is None else (file[0], {"gguf_file": file[1]})


@contextmanager
def weights_in_blocks() -> Iterator[None]:
    """Make transformers load GGUF files with weights in blocks inside the context."""
    try:
        from transformers.integrations.gguf import kernels
        from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS, PermuteRows
        from transformers.quantizers.quantizer_gguf import GgufHfQuantizer
    except ImportError:
        warnings.warn(
            "this version of transformers dequantizes the weights of GGUF files, so they are quantized again; install "
            "transformers 5.23 or newer to keep the weights of the file",
            stacklevel=2,
        )
        yield
        return

    host: Any = kernels
    with _one_at_a_time, ExitStack() as around:
        around.enter_context(_wrapped(GgufHfQuantizer, "read_header", _read_header))
        around.enter_context(
            _wrapped(GgufHfQuantizer, "_process_model_before_weight_loading", _put_in_blocks)
        )
        around.enter_context(_wrapped(GgufHfQuantizer, "get_state_dict", _state_dict))
        around.enter_context(_wrapped(PermuteRows, "convert", _permute_rows))
        around.enter_context(all_block_types())
        added = {name: build for name, build in _ARCHITECTURES.items() if name not in GGUF_ARCHS}
        around.enter_context(within(_keeps_blocks, True))
        host._gguf_kernel = kernels.get_gguf_kernel() or _KERNEL
        GGUF_ARCHS.update(added)
        try:
            yield
        finally:
            for name in added:
                del GGUF_ARCHS[name]


@contextmanager
def _wrapped(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a method inside the context by `function`, which gets the original method as its first argument."""
    original = vars(owner)[name]

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(partial(original, self), self, *args, **kwargs)

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _read_header(original: Callable[..., Any], quantizer: Any, gguf_file: str) -> None:
    """Check the number of layers before a model with this many layers is built.

    Raises:
        ValueError: the file names more layers than it has tensors.
    """
    from transformers.integrations.gguf.reader import read_gguf_metadata

    metadata, names = read_gguf_metadata(gguf_file)
    blocks = metadata.get(f"{metadata['general.architecture']}.block_count")
    if isinstance(blocks, int) and blocks > len(names):
        raise ValueError(
            f"{gguf_file} is damaged: it has {len(names)} tensors for {blocks} layers; download it again"
        )
    original(gguf_file)


def _put_in_blocks(original: Callable[..., Any], quantizer: Any, model: Any, **options: Any) -> None:
    """Plan the blocks of a model without a head by its names; the plan of transformers has the prefix of models with a head."""
    if not quantizer.supported or hasattr(model, model.base_model_prefix):
        original(model, **options)
        return
    from transformers.integrations.gguf import utils as host

    quantizer.mapping = host.get_gguf_conversion_mapping(quantizer.header.architecture, model.config)
    plan = host.get_gguf_plan(quantizer.header, quantizer.mapping)
    prefix = f"{model.base_model_prefix}."
    parts: list[dict[str, Any]] = [
        {name.removeprefix(prefix): value for name, value in part.items()} for part in plan
    ]
    quantizer.quantized, packable, quantizer.input_permutations = parts
    if not quantizer.quantization_config.dequantize:
        kernel, dtype = quantizer.kernel, quantizer.dtype
        quantizer.packed_modules = host.replace_with_gguf_modules(model, packable, kernel, dtype)


def _state_dict(original: Callable[..., Any], quantizer: Any, checkpoint_file: str, model: Any) -> Any:
    from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS

    quantizer.attn_requested = True  # otherwise transformers looks for an attention kernel on the Hub
    if not quantizer.supported:
        warnings.warn(
            f"{checkpoint_file}: transformers dequantizes the weights of this architecture, so they are quantized again; "
            f"architectures that keep the weights of the file: {', '.join(sorted(GGUF_ARCHS))}",
            stacklevel=2,
        )
    return original(checkpoint_file, model)


def _permute_rows(
    original: Callable[..., Any], operation: Any, tensors: Any, *args: Any, **kwargs: Any
) -> Any:
    """Check the number of rows, because transformers would use the first rows of a larger tensor.

    Raises:
        ValueError: a tensor has another number of rows than the model.
    """
    (tensor,) = tensors.values()
    rows = len(tensor[0] if isinstance(tensor, list) else tensor)
    expected = len(operation.permutation) + operation.offset
    if rows != expected:
        raise ValueError(
            f"{', '.join(tensors)}: {rows} rows, but the settings of the file require {expected}"
        )
    return original(tensors, *args, **kwargs)


def load_in_blocks(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function`, a `from_pretrained` of transformers with `gguf_file=`, so that weights stay in blocks.

    Raises:
        ValueError: the file cannot be read, or it lacks tensors of the model, which transformers would fill with random values.
    """
    from huggingface_hub.errors import StrictDataclassError

    damage = (
        struct.error,
        ArithmeticError,
        AssertionError,
        LookupError,
        RuntimeError,
        StrictDataclassError,
    )
    file = kwargs["gguf_file"]
    with weights_in_blocks():
        try:
            model, info = function(*args, **{**kwargs, "output_loading_info": True})
        except damage as error:
            raise ValueError(
                f"{file} is damaged, or transformers does not support its format: {error}"
            ) from error
    prefix = f"{model.base_model_prefix}."
    base = prefix if hasattr(model, model.base_model_prefix) else ""
    missing = sorted(name for name in info["missing_keys"] if name.startswith(base))
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"{file} is damaged: it lacks {', '.join(missing[:3])}{more}; download it again")
    return (model, info) if kwargs.get("output_loading_info") else model


def _decoder(norms: Mapping[str, str], *, offset: bool = False, **names: str) -> list[Any]:
    """Return the renamings of a decoder-only model. With `offset`, llama.cpp stores the weights of norms with 1 added."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming
    from transformers.integrations.gguf import gguf_conversion_mapping as host

    mapping: list[Any] = [
        WeightRenaming(rf"\.{theirs}\.", f".{ours}.") for theirs, ours in names.items()
    ] + list(host.DENSE_DECODER_RENAMINGS)
    for theirs, ours in {r"^output_norm\.": "model.norm.", **norms}.items():
        if offset:
            mapping.append(
                WeightConverter(f"{theirs}weight", f"{ours}weight", operations=[host.SubtractOne()])
            )
        else:
            mapping.append(WeightRenaming(theirs, ours))
    return mapping


_PRE_NORMS = {r"\.attn_norm\.": ".input_layernorm.", r"\.ffn_norm\.": ".post_attention_layernorm."}
_HEAD_NORMS = {r"\.attn_q_norm\.": ".self_attn.q_norm.", r"\.attn_k_norm\.": ".self_attn.k_norm."}
_SANDWICH_NORMS = {
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.post_attention_norm\.": ".post_attention_layernorm.",
    r"\.ffn_norm\.": ".pre_feedforward_layernorm.",
    r"\.post_ffw_norm\.": ".post_feedforward_layernorm.",
}


def _llama(config: Any) -> list[Any]:
    """Return the renamings of Llama. The file interleaves the two halves of each head of query and key."""
    from transformers.core_model_loading import WeightConverter
    from transformers.integrations.gguf.gguf_conversion_mapping import PermuteRows

    mapping = _decoder(_PRE_NORMS)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    for name, count in heads.items():
        order = torch.arange(count * head_dim, device="cpu").view(count, head_dim // 2, 2).mT.reshape(-1)
        for part in ("weight", "bias"):
            path = f".self_attn.{name}_proj.{part}"
            mapping.append(WeightConverter(path, path, operations=[PermuteRows(order)]))
    return mapping


def _gemma(norms: Mapping[str, str]) -> list[Any]:
    """Return the renamings of Gemma. The embeddings are dequantized: their rows are scaled, and the head shares them."""
    from transformers.core_model_loading import WeightConverter
    from transformers.integrations.gguf.gguf_conversion_mapping import Cast

    path = "model.embed_tokens.weight"
    return [
        *_decoder(norms, offset=True),
        WeightConverter(path, path, operations=[Cast(torch.float32)]),
    ]


_ARCHITECTURES: dict[str, Callable[[Any], list[Any]]] = {
    "llama": _llama,
    "qwen2": lambda _: _decoder(_PRE_NORMS),
    "qwen3": lambda _: _decoder(_PRE_NORMS | _HEAD_NORMS),
    "phi3": lambda _: _decoder(_PRE_NORMS, attn_qkv="self_attn.qkv_proj", ffn_up="mlp.gate_up_proj"),
    "gemma2": lambda _: _gemma(_SANDWICH_NORMS),
    "gemma3": lambda _: _gemma(_SANDWICH_NORMS | _HEAD_NORMS),
}
