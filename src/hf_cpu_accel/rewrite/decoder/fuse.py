"""Find the decoder layers of a model, match and verify their parts, and fuse them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hf_cpu_accel.lazy.causal_mask import CausalMask
from hf_cpu_accel.lazy.position_bias import PositionBias
from hf_cpu_accel.patching.fused_module import FusedModuleMixin
from hf_cpu_accel.patching.hooks import forward_hooks, has_foreign_hook
from hf_cpu_accel.plan import PlanItem, Structure
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.foreign_code import attempt
from hf_cpu_accel.rewrite.core.packed_source import source
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.rewrite.decoder.calls import LayerCall, RefusedStack, Stack, stacks_of
from hf_cpu_accel.rewrite.decoder.layer import fuse
from hf_cpu_accel.rewrite.decoder.masks import form_of
from hf_cpu_accel.rewrite.decoder.match import match_layer
from hf_cpu_accel.rewrite.decoder.probe import record
from hf_cpu_accel.rewrite.decoder.randomized_copy import randomized_copy_of
from hf_cpu_accel.rewrite.decoder.relative_bias import read_relative_bias
from hf_cpu_accel.rewrite.decoder.role import Biases, Role, role_of
from hf_cpu_accel.rewrite.decoder.rotary import RotaryGroups, Rotation, rotations
from hf_cpu_accel.rewrite.decoder.scores import Slopes, find_slopes
from hf_cpu_accel.rewrite.decoder.trace import DecoderTrace
from hf_cpu_accel.rewrite.decoder.verify import Verification
from hf_cpu_accel.rewrite.linear.layer import PERMUTED, is_permuted
from hf_cpu_accel.rewrite.linear.tensor_parallel import BETWEEN, is_joined
from hf_cpu_accel.tolerance import EXACT

STRUCTURE = Structure("decoder layer")
WATCHED = "it has hooks or a replaced forward, or skip_modules names a part of it: its parts run separately"


def fuse_decoder_layers(context: Context) -> list[PlanItem]:
    """Fuse every decoder layer of the model. Call it after linears are packed and attention is replaced."""
    items: list[PlanItem] = []
    for stack in stacks_of(context.root):
        if isinstance(stack, RefusedStack):
            for path, _ in stack.layers:
                context.refuse(path, STRUCTURE, stack.refusal)
            continue
        last = stack.layers[-1][1]
        following = [*(layer for _, layer in stack.layers[1:]), None]
        for (path, layer), after, role in zip(stack.layers, following, _roles(stack, context), strict=True):
            if isinstance(role, Refusal):
                context.refuse(path, STRUCTURE, role)
            elif role is not None:
                role = dataclasses.replace(
                    role,
                    is_returned=layer is last and stack.returned,
                    skips_padding=context.config.padding == "skip",
                )
                context.swap(layer, fuse(layer, role, after))
                dtype = context.dtypes.names(path, layer)
                items.append(PlanItem(path, STRUCTURE, "decoder_layers", dtype, 0, reason=None))
    return items


def _roles(stack: Stack, context: Context) -> Iterator[Role | Refusal | None]:
    """Yield the verified match of each layer, or the reason why it is not fused; None for a layer of another kind."""
    reader = _Reader()
    for (path, layer), call in zip(stack.layers, stack.calls, strict=True):
        if isinstance(layer, FusedModuleMixin) or not context.tree.slots[id(layer)]:
            yield None
        elif is_joined(layer):
            yield Refusal(BETWEEN)
        elif _may_be_fused(path, layer, context):
            role = attempt(path, reader.role, layer, call)
            if isinstance(role, Role) and role.keeps is not None:
                reader.kept[role.keeps] = role.cache_index
            yield role
        else:
            yield Refusal(WATCHED)


def _may_be_fused(path: str, layer: nn.Module, context: Context) -> bool:
    """Return whether no setting skips the layer, and no hooks watch or change values inside of it."""
    inside = [module for module in layer.modules() if module is not layer]
    return (
        not any(context.skipped(f"{path}.{name}" if name else path) for name, _ in layer.named_modules())
        and layer._compiled_call_impl is None
        and not any("forward" in vars(module) for module in layer.modules())
        and not any(has_foreign_hook(hooks) for module in inside for hooks in forward_hooks(module))
    )


class _Reader:
    """Match the layers of one stack, in their order."""

    def __init__(self) -> None:
        self.groups = RotaryGroups()
        self.tables: list[Tensor] = []  # the own position biases of earlier layers
        self.slopes: Slopes | None = None  # of the last layer with slopes
        self.compared: set[tuple[type, type]] = (
            set()
        )  # kinds of layers with one fused layer compared with its own forward
        self.kept: dict[str, int] = {}  # cache indices of keys that earlier layers share
        self.usual: dict[Rotation | None, float] = {}  # rotations of earlier layers, and their errors

    def role(self, layer: nn.Module, call: LayerCall) -> Role | Refusal | None:
        """Return the role of a layer; None if it stores nothing in the cache: it is an encoder layer that can also be a decoder
        layer.

        Raises:
            Refused: it raises for its arguments.
        """
        with torch.no_grad():
            copied = randomized_copy_of(layer)
            trace = record(copied, call)
            if not trace.stored:
                return None
            if is_permuted(layer):
                return Refusal(PERMUTED)
            biases = self._biases(layer, copied, call, trace)
            dtype = call.hidden_states.dtype
            if biases is None:
                return Refusal("its attention bias does not come from a table of relative distances")
            parts = match_layer(copied, trace, biases.own, dtype)
            if isinstance(parts, Refusal):
                return parts
            mask = call.arguments[call.mask]
            # A mask of a few tokens does not show a window; the arguments of attention do.
            window = mask.window if isinstance(mask, CausalMask) else trace.attention[0].window
            if parts.hides and window is not None:
                return Refusal("it has two attention windows: its own and one from its arguments")
            form = form_of(mask, window)
            slopes = None if parts.alibi is None else self._slopes(call, parts.alibi)
            if form is None:
                return Refusal("the form of its attention mask is not supported")
            if slopes is None and parts.alibi is not None:
                return Refusal("its ALiBi slopes are not among its arguments")
            alibi = None if slopes is None else slopes.slopes
            role = role_of(
                dataclasses.replace(parts, window=parts.window if parts.hides else window, alibi=alibi),
                call,
                trace,
                biases,
                form,
                slopes,
            )
            if role is None:
                return Refusal("it returns values that the fused layer does not compute")
            if trace.takes is not None:
                if trace.takes not in self.kept:
                    return Refusal("it uses keys and values of a layer that is not fused")
                role = dataclasses.replace(role, cache_index=self.kept[trace.takes])
            role = self._match_rotation(role, layer, copied, call, biases)
            if role is None:
                return Refusal("its use of the rotary tables is not supported")
            kind = type(layer), type(role.parts.ffn)
            if (
                source() is not None and kind in self.compared
            ):  # all were compared when these weights were packed
                return role
            shadow = Shadow(layer)
            verification = Verification(shadow.module, call, role.cache_index, None, biases.handed)
            with shadow.running():
                error = verification.error(role)
            with shadow.running():
                is_off = error > verification.tolerance and not verification.is_rounding(role)
            if is_off:
                return Refusal(
                    f"the fused version differs by {error:.1e} (allowed {verification.tolerance:.0e})"
                )
            self.compared.add(kind)
            return role

    def _slopes(self, call: LayerCall, slopes: Tensor) -> Slopes | None:
        """Return the source of a layer's slopes: the same object for layers that get the same."""
        found = find_slopes(call, slopes)
        if found is None:
            return None
        known = self.slopes
        if known is None or known.name != found.name or not torch.equal(known.slopes, found.slopes):
            self.slopes = found
        return self.slopes

    def _biases(
        self, layer: nn.Module, copied: nn.Module, call: LayerCall, trace: DecoderTrace
    ) -> Biases | None:
        """Return the position biases of a trace, if their tables are known, or None."""
        used = [attention.bias for attention in trace.attention]
        names = [_name_of(call, bias) for bias in used]
        handed: dict[str, Tensor | None] = {}
        own = None
        for number, (bias, name) in enumerate(zip(used, names, strict=True)):
            if bias is None:
                continue
            if name is not None:
                known = [None, *self.tables]
                table = next((t for t in known if torch.equal(_bias_of(t, bias), bias)), bias)
                if table is bias or name in handed:
                    return None
                handed[name] = table
            elif bias.any():
                own = read_relative_bias(copied, call) if number == 0 else None
                if own is None:
                    return None
                self.tables.append(own.table(layer))  # later layers may get it
        return Biases(own, handed, tuple(names))

    def _match_rotation(
        self, role: Role, layer: nn.Module, copied: nn.Module, call: LayerCall, biases: Biases
    ) -> Role | None:
        """Return the role with the use of rotary tables that agrees with `copied`, or None."""
        verification = Verification(copied, call, role.cache_index, torch.float32, biases.handed)
        choices = [*rotations(layer, call, role.parts.head_dim, self.groups), None]
        choices.sort(key=lambda rotation: rotation not in self.usual)
        best, best_error, best_rotation = None, verification.tolerance, None
        for rotation in choices:
            candidate = _with_rotation(role, rotation)
            error = verification.error(candidate)
            if error <= best_error:
                best, best_error, best_rotation = candidate, error, rotation
            if error <= max(EXACT, 4 * self.usual.get(rotation, 0.0)):
                break
        if best is None:
            return None
        self.usual.setdefault(best_rotation, best_error)
        causal = (
            verification.error(dataclasses.replace(best, causal=True), masked=False) <= verification.tolerance
        )
        return dataclasses.replace(best, causal=causal)


def _name_of(call: LayerCall, value: Tensor | None) -> str | None:
    """Return the name of the argument that is `value`, or None."""
    return next((name for name, other in call.arguments.items() if other is value is not None), None)


def _bias_of(table: Tensor | None, like: Tensor) -> Tensor:
    _, heads, q_len, kv_len = like.shape
    return PositionBias.of(table, heads, q_len, kv_len, like.dtype).tensor


def _with_rotation(role: Role, rotation: Rotation | None) -> Role:
    """Return the role with one use of the tables, or without them for None (NoPE layers of SmolLM3)."""
    if rotation is None:
        return role
    parts = dataclasses.replace(
        role.parts, rotary_dim=rotation.rotary_dim, rotary_interleaved=rotation.interleaved
    )
    ignored = role.ignored - {rotation.source.argument}
    return dataclasses.replace(role, parts=parts, rotary=rotation.source, ignored=ignored)
