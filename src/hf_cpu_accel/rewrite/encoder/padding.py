"""Find the models that read hidden states at padding positions, which fused encoder layers skip.

Most models never do: their heads read tokens, or pool with the mask. But BERT's pooler reads the first position, which is
padding in a left-padded batch, and SigLIP's text model the last one. So each model around fused layers is called twice with a
small padded batch; the two calls differ only in the values that its layers return at padding. If an output changes, batches with
padding at this end are computed with their padding.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import float_tensors
from hf_cpu_accel.hosts.arguments import parameters_of
from hf_cpu_accel.hosts.models import pretrained_models
from hf_cpu_accel.patching.hooks import forward_hooks, has_foreign_hook
from hf_cpu_accel.rewrite.core.foreign_code import attempt, call_foreign, ours
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.rewrite.encoder.layer import BOTH_ENDS, FusedEncoderLayer
from hf_cpu_accel.tolerance import MOVED

FIRST, LAST = BOTH_ENDS

_TOKENS, _PADDED = 7, 3
_SAMPLES = 4000
_WORDS = {
    (FIRST,): "the first position is read even if it is padding: left padding is computed",
    (LAST,): "the last position is read even if it is padding: right padding is computed",
    BOTH_ENDS: "padding positions are read: all padding is computed",
}
_UNKNOWN = "it is unknown whether padding positions are read: all padding is computed"

Batch = dict[str, Tensor]


def find_padding_readers(root: nn.Module) -> tuple[str, ...]:
    """Make the fused encoder layers of `root` compute the padding that is read, and return notes about it."""
    skipping: list[FusedEncoderLayer] = [
        m for m in root.modules() if isinstance(m, FusedEncoderLayer) and m._skips_padding
    ]
    models = pretrained_models()
    if not models:
        for layer in skipping:
            layer._computed_ends = ()  # only masks of transformers mark padding
        return ()
    notes: list[str] = []
    waiting: dict[int, FusedEncoderLayer] = {id(layer): layer for layer in skipping}
    for path, model in root.named_modules():
        inside = {id(m) for m in model.modules()} if isinstance(model, models) else set()
        layers = [layer for key, layer in waiting.items() if key in inside]
        read = attempt(path, _ends_read, model, layers) if layers else None
        ends = None if isinstance(read, Refusal) else read
        # A part without an attention_mask argument cannot be tested; the model around it decides.
        if ends is None and not (layers and "attention_mask" in parameters_of(model.forward)):
            continue
        for layer in layers:
            layer._computed_ends = BOTH_ENDS if ends is None else ends
            del waiting[id(layer)]
        if ends != ():
            notes.append(f"{path or type(model).__name__}: {_UNKNOWN if ends is None else _WORDS[ends]}")
    for layer in waiting.values():
        layer._computed_ends = BOTH_ENDS
    for layer in skipping:
        layer._bound = None  # of our own calls nothing stays
    if waiting:
        notes.append(f"{len(waiting)} encoder layers: {_UNKNOWN}")
    return tuple(notes)


@dataclass
class _Planter:
    """Write random numbers, which depend on the seed, where a layer skips padding.

    `tokens`: bool [B, L], the positions that the layers computed in the last call.
    """

    seed: int
    tokens: list[Tensor] = field(default_factory=list)

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        with ours():
            tokens = layer.tokens_of(args, kwargs)
        if tokens is None:
            return None
        self.tokens.append(tokens)
        states = output[0] if isinstance(output, tuple) else output
        generator = torch.Generator().manual_seed(self.seed)
        noise = torch.randn(states.shape, generator=generator).to(states.dtype) * states.std()
        planted = torch.where(tokens[..., None], states, noise)
        return (planted, *output[1:]) if isinstance(output, tuple) else planted


def _ends_read(model: Any, layers: Sequence[FusedEncoderLayer]) -> tuple[int, ...] | None:
    """Return FIRST, LAST or both, or None if `model` accepts none of the known batches, or hooks watch its calls."""
    if any(has_foreign_hook(hooks) for module in model.modules() for hooks in forward_hooks(module)):
        return None
    names = parameters_of(model.forward)
    for main, make in _BATCHES:
        if main not in names or "attention_mask" not in names:
            continue
        one, other = _Planter(0), _Planter(1)
        batch = call_foreign(make, model, names)
        if isinstance(batch, Refusal):
            continue
        outputs, others = (_call(model, batch, layers, planter) for planter in (one, other))
        if isinstance(outputs, Refusal) or isinstance(others, Refusal):
            continue
        if not one.tokens:
            return ()  # nothing is ever skipped
        return _moved(outputs, others, one.tokens[0])
    return None


def _call(
    model: Any, batch: Batch, layers: Sequence[FusedEncoderLayer], planter: _Planter
) -> list[Tensor] | Refusal:
    """Return the outputs of `model` for the batch, from a shadow: other threads may call the model meanwhile."""
    shadow = Shadow(model)
    for layer in layers:
        looked_at = shadow.of(layer)
        looked_at._computed_ends = ()  # skips all padding
        looked_at.register_forward_hook(planter, with_kwargs=True)
    given = {name: value.clone() for name, value in batch.items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad(), shadow.running():
        torch.manual_seed(0)
        output = call_foreign(shadow.module, **given)
    return output if isinstance(output, Refusal) else float_tensors(output)


def _text(model: Any, names: Container[str]) -> Batch:
    """Return two sequences, the first padded on the left and the second on the right."""
    config = model.config.get_text_config()
    vocabulary = config.vocab_size
    ids = (5 + torch.arange(2 * _TOKENS).view(2, _TOKENS)) % vocabulary
    mask = torch.ones(2, _TOKENS, dtype=torch.long)
    mask[0, :_PADDED] = mask[1, -_PADDED:] = 0
    # Some models look for the end of a text by its token, or by the largest one.
    end = getattr(config, "eos_token_id", None)
    if isinstance(end, int) and 0 <= end < vocabulary:
        ids[0, -1] = ids[1, -_PADDED - 1] = end
    pad = getattr(config, "pad_token_id", None)
    ids[mask == 0] = pad if isinstance(pad, int) and 0 <= pad < vocabulary else 0
    batch = {"input_ids": ids, "attention_mask": mask}
    decodes = "decoder_input_ids" in names
    return {**batch, "decoder_input_ids": ids[:, _PADDED : _PADDED + 2]} if decodes else batch


def _sound(model: Any, names: Container[str]) -> Batch:
    mask = torch.ones(2, _SAMPLES, dtype=torch.long)
    mask[:, _SAMPLES // 2 :] = 0
    samples = torch.randn(2, _SAMPLES, generator=torch.Generator().manual_seed(0))
    return {"input_values": samples.to(model.dtype), "attention_mask": mask}


def _text_and_images(model: Any, names: Container[str]) -> Batch:
    config = model.config.vision_config
    shape = (2, getattr(config, "num_channels", 3), config.image_size, config.image_size)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    return {**_text(model, names), "pixel_values": images}


# By the required argument of a model.
_BATCHES: tuple[tuple[str, Callable[[Any, Container[str]], Batch]], ...] = (
    ("pixel_values", _text_and_images),
    ("input_ids", _text),
    ("input_values", _sound),
)


def _moved(outputs: list[Tensor], others: list[Tensor], tokens: Tensor) -> tuple[int, ...]:
    """Return the ends at which a sequence has padding that changes its output, apart from the values at padding themselves."""
    rows = torch.zeros(len(tokens), dtype=torch.bool)
    for one, other in zip(outputs, others, strict=True):
        change, bound = (one - other).abs(), MOVED * one.abs().max()
        if one.dim() > 1 and one.shape[1::-1] == tokens.shape:
            change = change.transpose(0, 1)
        if change.dim() > 1 and change.shape[:2] == tokens.shape:
            change = change * tokens.view(*tokens.shape, *[1] * (change.dim() - 2))
        apart = change.dim() > 0 and len(change) == len(tokens)
        moved = ~(change <= bound)  # NaN, too
        moved = moved.flatten(1).any(1) if apart and change.dim() > 1 else moved
        rows |= moved if apart else moved.any()
    return tuple(end for end in (FIRST, LAST) if (rows & ~tokens[:, end]).any())
