"""Vocabulary heads whose weight consists of two matrices, as in MobileBERT: the part of the width of the embeddings is tied to
them.

    scores = x[:, :narrow] @ decoder.weight^T + x[:, narrow:] @ dense.weight + decoder.bias

The host concatenates the two in every call: 62 MB are copied for 30522 tokens of 512 features, and multiplied as float32 in any
packed dtype. Here each stays in place, the second is packed the way it is used, and its product is added in the epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, Reference, fused_layer
from hf_cpu_accel.patching.hooks import is_plain
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.context import Context, linear_refusal, refusal_to_swap
from hf_cpu_accel.rewrite.core.fuse_each import fuse_each
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.rewrite.core.verify import probe, run, run_alone
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.linear.match import pack, packed_item, release
from hf_cpu_accel.rewrite.linear.transposed import STRUCTURE as TRANSPOSED
from hf_cpu_accel.tolerance import FORMULA, PACKED

STRUCTURE = "split head"


@dataclass(frozen=True)
class SplitHead:
    """The names of its children.

    Attributes:
        transform: the module that the hidden states go through first; it keeps their width.
        decoder: the linear of the first features, with the bias of all.
        dense: the matrix for the other features, [features, vocabulary].
    """

    transform: str
    decoder: str
    dense: str


class FusedSplitHead(FusedModuleMixin):
    """Mixed into the host's own class: hidden_states [..., hidden_size] -> scores [..., vocabulary].

    Its own forward runs where hooks read values inside, for other arguments, and while a graph is traced.
    """

    _head: SplitHead

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden_states = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(hidden_states, Tensor) or self.is_watched or torch.compiler.is_compiling():
            return self._original_class.forward(self, *args, **kwargs)
        check_inference(self, hidden_states)
        head = self._head
        transform, decoder, dense = (
            self._modules[name] for name in (head.transform, head.decoder, head.dense)
        )
        assert transform is not None
        assert decoder is not None
        assert isinstance(dense, PackedLinear)
        transformed = transform(hidden_states)
        narrow = transformed.shape[-1] - dense.in_features
        add = dense.group.fused_route(dense.index, "none", residual=True)
        return add(transformed[..., narrow:], decoder(transformed[..., :narrow]))

    def reference_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reference | None:
        return None if self.is_watched else Reference(args, kwargs)


class SplitHeadRule:
    """Pack the dense part as it is used. `fuse_split_heads` replaces the forward that calls it."""

    name = STRUCTURE

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        head = _guess(module, nn.Linear)
        if head is None or refusal_to_swap(module, path, context) is not None:
            return None
        decoder, dense = module.get_submodule(head.decoder), module.get_submodule(head.dense)
        assert isinstance(decoder, nn.Linear)
        assert isinstance(dense, nn.Linear)
        used = _as_it_is_used(dense)
        if linear_refusal(used, f"{path}.{head.dense}", context) is not None or not is_plain(dense):
            return None
        input = probe(decoder.in_features + used.in_features, dense.weight.dtype)
        transformed = run_alone(module.get_submodule(head.transform), input)
        if transformed is None or transformed.shape != input.shape:
            return None
        with torch.no_grad():
            whole = torch.cat((decoder.weight.T, dense.weight))
            comparison = compare(run_alone(module, input), transformed @ whole + decoder.bias)
        agrees = comparison.within(FORMULA.of(dense.weight.dtype))
        return Match(module, path, (head.dense, used)) if agrees else None

    def apply(self, match: Match, context: Context) -> Outcome:
        name, used = match.data
        path, dense = f"{match.path}.{name}", match.module.get_submodule(name)
        dtype, group = context.dtypes.of_weight(path, [used]), context.config.int4_group
        packed = pack([used], dtype, int4_group=group, measured=context.measured, transposed=True)[0]
        context.swap(dense, packed)
        release(dense, packed, context)
        return Outcome((packed_item(path, TRANSPOSED, "linear", packed),), (dense,))


def fuse_split_heads(context: Context) -> list[PlanItem]:
    """Fuse the forward that adds the two products in each such head. Call it after linears are packed."""
    return fuse_each(context, STRUCTURE, _match_split_head, _op_and_dtype)


def _op_and_dtype(fused: FusedSplitHead, path: str) -> tuple[str, str]:
    dense = fused.get_submodule(fused._head.dense)
    assert isinstance(dense, PackedLinear)
    return "linear", dense.packed_dtype


def _match_split_head(module: nn.Module, path: str, context: Context) -> FusedSplitHead | Refusal | None:
    head = _guess(module, PackedLinear)
    if head is None:
        return None
    reason = refusal_to_swap(module, path, context)
    if reason is not None:
        return Refusal(reason)
    dense, decoder = module.get_submodule(head.dense), module.get_submodule(head.decoder)
    assert isinstance(dense, PackedLinear)
    assert isinstance(decoder, nn.Linear | PackedLinear)
    input = probe(decoder.in_features + dense.in_features, dense.weight_dtype)
    shadow = Shadow(module)
    with shadow.running():
        expected = run(shadow.module, input)
        given = run(_build_split_head(shadow.module, head), input)
    # Its own forward multiplies the dequantized weights; the rule has verified the structure before packing.
    packed = [part for part in (decoder, dense) if isinstance(part, PackedLinear)]
    allowed = max(PACKED.of(part.packed_dtype, part.weight_dtype) for part in packed)
    reason = compare(given, expected).reason(allowed)
    return _build_split_head(module, head) if reason is None else Refusal(reason)


def _build_split_head(module: nn.Module, head: SplitHead) -> FusedSplitHead:
    fused: FusedSplitHead = fused_layer(FusedSplitHead, module, _head=head)
    return fused


def _guess(module: nn.Module, dense_kind: type[nn.Linear] | type[PackedLinear]) -> SplitHead | None:
    """Return the parts of a module with three children and no parameter but the bias of one, or None."""
    children = dict(module.named_children())
    if len(children) != 3 or module._buffers:
        return None
    own = {id(parameter) for parameter in module._parameters.values()}
    for name, decoder in children.items():
        if not isinstance(decoder, nn.Linear | PackedLinear) or decoder.bias is None:
            continue
        if own <= {id(decoder.bias)}:
            others = [(other, child) for other, child in children.items() if other != name]
            for (dense_name, dense), (transform, _) in (others, others[::-1]):
                if isinstance(dense, dense_kind) and _are_a_head(decoder, dense):
                    return SplitHead(transform, name, dense_name)
    return None


def _are_a_head(decoder: nn.Linear | PackedLinear, dense: nn.Linear | PackedLinear) -> bool:
    if isinstance(dense, PackedLinear):
        return dense.transposed and dense.bias is None and dense.out_features == decoder.out_features
    return dense.bias is None and dense.in_features == decoder.out_features


def _as_it_is_used(dense: nn.Linear) -> nn.Linear:
    """Return a linear over a view of its weight: input @ weight."""
    used = nn.Linear(dense.out_features, dense.in_features, bias=False, device="meta")
    used.weight = nn.Parameter(dense.weight.detach().T, requires_grad=False)
    return used
