"""Find the recurrent mixers in a model, verify their structure, and fuse them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import row_error
from hf_cpu_accel.guard.modules import class_of, instance_forward
from hf_cpu_accel.hosts.arguments import parameters_of, takes_cache, with_its_cache_name
from hf_cpu_accel.patching.fused_module import fused_layer
from hf_cpu_accel.plan import PlanItem, Structure
from hf_cpu_accel.rewrite.core.context import Context, refusal_to_swap
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.fuse_each import fuse_each
from hf_cpu_accel.rewrite.core.packed_module import PackedModule
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.rewrite.mixer.match import fuse_mixer_layers
from hf_cpu_accel.rewrite.recurrent.candidates import NO_BOUNDS, candidates, dt_bounds
from hf_cpu_accel.rewrite.recurrent.layer import RecurrentMixer
from hf_cpu_accel.rewrite.recurrent.parts import Mixer
from hf_cpu_accel.tolerance import EXACT, RECURRENT_MIXER

STRUCTURE = Structure("recurrent mixer", "block")

_BATCH, _PROMPT, _PADDING = 2, 9, 3


def fuse_recurrent_mixers(context: Context) -> list[PlanItem]:
    """Fuse every mixer of the model. Call it after linears are packed."""

    def op_and_dtype(fused: RecurrentMixer, path: str) -> tuple[str, str]:
        return fused._mixer.op, context.dtypes.names(path, fused)

    items = fuse_each(context, STRUCTURE, _match_mixer, op_and_dtype)
    read = {name for item in items for name in _read_by_ops(context.root, item.name)}
    context.results.items[:] = [
        item for item in context.results.items if item.reason is None or item.name not in read
    ]
    return items


def fuse_recurrent_layers(context: Context) -> list[PlanItem]:
    """Fuse every layer of the model that has such a mixer. Call it after mixers are fused."""

    def op_of(mixer: RecurrentMixer) -> str:
        return mixer._mixer.op

    return fuse_mixer_layers(context, RecurrentMixer, Structure("recurrent layer"), op_of)


def _read_by_ops(root: nn.Module, path: str) -> set[str]:
    """Return the paths of modules whose parameters the op reads now."""
    mixer: Any = root.get_submodule(path)
    parts = (mixer._mixer.convolution, mixer._mixer.norm)
    return {path, *(f"{path}.{name}" for name in parts if name is not None)}


def _match_mixer(module: nn.Module, path: str, context: Context) -> RecurrentMixer | Refusal | None:
    """Return the mixer with the fused forward if both agree; None if it is of another kind."""
    possible = candidates(module)
    if not possible or isinstance(module, RecurrentMixer):
        return None
    reason = refusal_to_swap(module, path, context) or _unsupported_reason(module, possible[0])
    if reason is not None:
        return Refusal(reason)
    expected = _expected(module, widened=possible[0].is_rounded)
    _forget_values(module)
    if isinstance(expected, Refusal):
        return expected
    allowed = RECURRENT_MIXER.of(_dtype_of(module))
    enough = allowed if dt_bounds(module) == NO_BOUNDS else EXACT  # bounds of time steps change little
    best, least = possible[0], float("inf")
    for mixer in possible:
        error = _error(module, mixer, expected)
        if error < least:
            best, least = mixer, error
        if error <= enough:
            break
    if least <= allowed:
        return _build_mixer(module, best)
    return Refusal(f"the fused version differs by {least:.1e} (allowed {allowed:.0e})")


def _forget_values(module: nn.Module) -> None:
    """Forget the unpacked weights that the own forward read (Mamba's multiplies by that of a linear): the fused one does not
    read them."""
    for part in module.modules():
        if isinstance(part, PackedModule):
            part._values.clear()


def _unsupported_reason(module: Any, mixer: Mixer) -> str | None:
    """Return the reason for the column "left because", or None."""
    convolution = module._modules[mixer.convolution]
    if any(instance_forward(part) is not None for part in module.modules()):
        return "a module in it has a replaced forward"
    if type(convolution) is not nn.Conv1d or convolution.groups != convolution.in_channels:
        return "its convolution is not a depthwise nn.Conv1d"
    if not takes_cache(parameters_of(module.forward)) or not isinstance(
        getattr(module, "layer_idx", None), int
    ):
        return "it does not take the cache of transformers as past_key_values"
    if _dtype_of(module) not in (torch.float32, torch.bfloat16):
        return f"it runs in {_dtype_of(module)}, only float32 and bfloat16 are supported"
    return None


def _dtype_of(module: nn.Module) -> torch.dtype:
    """Return the dtype of the module's activations."""
    packed = (part.weight_dtype for part in module.modules() if isinstance(part, PackedModule))
    return next(packed, None) or next(module.parameters()).dtype


def _build_mixer(module: nn.Module, mixer: Mixer) -> RecurrentMixer:
    names = tuple(parameters_of(module.forward))
    mixer.prepare(module)
    fused: RecurrentMixer = fused_layer(RecurrentMixer, module, _mixer=mixer, _names=names)
    return fused


@dataclass(frozen=True)
class _Run:
    """The outputs of a mixer for a padded prompt, the token after it and a prompt without a cache, and the final states."""

    outputs: tuple[Any, ...]
    states: tuple[Any, ...]

    def as_rows(self) -> _Run:
        """Return all outputs as one row, and each state."""
        outputs = torch.cat([output.float().flatten() for output in self.outputs])
        return _Run((outputs[None],), tuple(state.reshape(1, -1) for state in self.states))


def _expected(module: nn.Module, *, widened: bool) -> _Run | Refusal:
    """Return the outputs of the own forward, in float32 if `widened`."""
    shadow = Shadow(module)
    _move_to_bounds(shadow.module)
    if widened:
        _widen(shadow.module)
    with torch.no_grad(), shadow.running():
        run: _Run | Refusal = call_foreign(_run, shadow.module, _dtype_of(module))
    return run


def _move_to_bounds(copied: nn.Module) -> None:
    """Make about half of the time steps of a shadow lie beyond their bounds, which trained ones seldom reach."""
    bounds = [bound for bound in dt_bounds(copied) if bound not in NO_BOUNDS]
    if not bounds:
        return
    bias = copied._parameters["dt_bias"]
    assert bias is not None
    near = (
        torch.tensor(bounds, dtype=torch.float64).expm1().log().to(bias.dtype)
    )  # softplus of it is the bound
    copied._parameters["dt_bias"] = nn.Parameter(near.repeat(len(bias))[: len(bias)], requires_grad=False)


def _widen(copied: nn.Module) -> None:
    """Make a shadow compute in float32, with the same values of its weights."""
    for part in copied.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(parameter.detach().float(), requires_grad=False)
        if isinstance(part, PackedModule):
            part.weight_dtype = torch.float32


def _error(module: nn.Module, mixer: Mixer, expected: _Run) -> float:
    shadow = Shadow(module)
    _move_to_bounds(shadow.module)
    with torch.no_grad(), shadow.running():
        run = _run(_build_mixer(shadow.module, mixer), _dtype_of(module))
    if (
        mixer.is_rounded
    ):  # a token for which B and C are nearly at right angles has outputs near 0: all are one row
        run, expected = run.as_rows(), expected.as_rows()
    return row_error((*run.outputs, *run.states), (*expected.outputs, *expected.states))


def _run(module: Any, dtype: torch.dtype) -> _Run:
    """Run the mixer on hidden states with values of this dtype."""
    from hf_cpu_accel.generate.recurrent_states import empty_cache

    features = next(p.in_features for name, p in module.named_children() if name.startswith("in_proj"))
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(_BATCH, _PROMPT + 1, features, generator=generator).to(dtype)
    states = states.to(_dtype_of(module))
    mask = torch.ones(_BATCH, _PROMPT, dtype=torch.long)
    mask[0, :_PADDING] = 0
    cache = empty_cache(module.layer_idx + 1)
    own: Any = class_of(module)
    names = parameters_of(own.forward)

    def run(x: Tensor, cache: Any, mask: Tensor | None) -> Tensor:
        output: Tensor = module(x, **with_its_cache_name(names, {"cache": cache, "attention_mask": mask}))
        return output

    prompt = run(states[:, :_PROMPT], cache, mask)
    token = run(states[:, _PROMPT:], cache, None)
    alone = run(states, None, None)
    layer = cache.layers[module.layer_idx]
    kept = (layer.conv_states[0], layer.recurrent_states[0])
    shown: tuple[Tensor, ...] = (prompt[mask.bool()], token, alone)
    return _Run(shown, tuple(state.flatten(0, -2) for state in kept if state is not None))
