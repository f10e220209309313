"""Accelerate layers of PyTorch Geometric: they keep their class and parameters, and `propagate` and `forward` are overridden."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_cpu_accel.hosts.pyg import message_passing
from hf_cpu_accel.patching.restore import add_attribute
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.context import Context

if TYPE_CHECKING:
    from torch_geometric.nn.aggr import Aggregation
    from torch_geometric.nn.conv import MessagePassing

    from hf_cpu_accel.graph.message import Message

_METHODS = ("forward", "message", "aggregate", "message_and_aggregate", "update", "edge_update")
_OWN_REDUCTION = "its aggregation is not supported, only sum, mean, min, max, var, std and lists of them"
_DENSE = "PyTorch's BLAS is as fast with one row per node: packing gains nothing"


def accelerate_message_passing(context: Context) -> list[PlanItem]:
    """Override `propagate` of each layer by `FastPropagate`, and `forward` if its class has a fast one. Both support training."""
    if not message_passing():
        return []
    from torch_geometric.nn.aggr import Aggregation
    from torch_geometric.nn.conv import MessagePassing
    from torch_geometric.nn.dense import Linear

    items: list[PlanItem] = []
    inner: set[int] = set()  # aggregations of layers, or of other aggregations
    for path, module in context.root.named_modules():
        if isinstance(module, MessagePassing | Aggregation):
            inner.update(id(part) for part in module.modules() if part is not module)
        if isinstance(module, MessagePassing):
            items.append(_accelerate(module, path, context))
        elif isinstance(module, Aggregation) and id(module) not in inner:
            items.append(_pool(module, path, context))
        elif isinstance(module, Linear):
            items.append(PlanItem.left(path, "linear", _DENSE))
        else:
            continue
        context.tree.handled.add(id(module))
    if context.config.reorder != "none" and items:
        items.append(_reorder(context))
    return items


def _reorder(context: Context) -> PlanItem:
    from hf_cpu_accel.graph.reorder import ReorderedForward

    if "forward" in vars(context.root):
        return PlanItem.left("", "node order", "its forward is already replaced")
    reordered = ReorderedForward(context.root, context.config.reorder)
    add_attribute(context.journal, context.root, "forward", reordered)
    op = f"reorder={context.config.reorder!r}"
    return PlanItem("", "node order", op, "float32", packed_bytes=0, reason=None)


def _pool(module: Aggregation, path: str, context: Context) -> PlanItem:
    from hf_cpu_accel.graph.pooling import FastPool
    from hf_cpu_accel.graph.reduction import read_reduction

    name = type(module).__name__
    if context.skipped(path):
        return PlanItem.left(path, name, "skip_modules")
    if "forward" in vars(module):
        return PlanItem.left(path, name, "its forward is already replaced")
    reduction = read_reduction(module)
    if reduction is None:
        return PlanItem.left(path, name, _OWN_REDUCTION)
    add_attribute(context.journal, module, "forward", FastPool(module, reduction))
    return PlanItem(path, f"pooling, {reduction}", reduction.op, "float32", packed_bytes=0, reason=None)


def _accelerate(conv: MessagePassing, path: str, context: Context) -> PlanItem:
    from torch_geometric.nn.conv import MessagePassing

    from hf_cpu_accel.graph.conv_registry import FORWARDS, PROPAGATES
    from hf_cpu_accel.graph.forward import FastForward
    from hf_cpu_accel.graph.message import read_message
    from hf_cpu_accel.graph.propagate import FastPropagate
    from hf_cpu_accel.graph.reduction import read_reduction
    from hf_cpu_accel.graph.scripting import StockForScript

    name = type(conv).__name__
    reduction = read_reduction(conv.aggr_module)
    refusal = "skip_modules" if context.skipped(path) else _unsupported_reason(conv)
    compute = next((compute for cls, compute in FORWARDS.items() if _is_class(conv, cls)), None)
    plain = type(conv).aggregate is MessagePassing.aggregate
    if refusal is None and (reduction is None or not (plain or compute)):
        refusal = _OWN_REDUCTION
    if refusal is not None or reduction is None:
        return PlanItem.left(path, name, refusal or "")
    message = read_message(conv, conv.inspector.get_param_names("message"))
    if message is not None and _update_gathers(conv):
        message = None
    special = next((compute for cls, compute in PROPAGATES.items() if _is_class(conv, cls)), None)
    propagate = FastPropagate(conv, message, reduction, special)
    if plain:
        add_attribute(context.journal, conv, "propagate", propagate)
    add_attribute(context.journal, conv, StockForScript.name, StockForScript(conv))
    context.tree.handled.update(_read_weights(conv))
    op = reduction.op if message is not None else f"custom message, {reduction.op}"
    if special is not None:
        op = f"{special.__name__}, {op}"
    if compute is not None:
        add_attribute(context.journal, conv, "forward", FastForward(conv, propagate, compute))
        op = f"{compute.__name__}, {op}" if plain else compute.__name__
    return PlanItem(path, f"{_describe(message)}, {reduction}", op, "float32", packed_bytes=0, reason=None)


def _is_class(conv: MessagePassing, cls: type[MessagePassing]) -> bool:
    """Return whether `conv` computes the same as `cls`: a subclass that overrides one of its methods does not."""
    return isinstance(conv, cls) and all(
        getattr(type(conv), method) is getattr(cls, method) for method in _METHODS
    )


def _unsupported_reason(conv: MessagePassing) -> str | None:
    if "propagate" in vars(conv) or "forward" in vars(conv):
        return "its propagate or forward is already replaced"
    cls = type(conv)
    # PyTorch Geometric generates `propagate` and `collect` for each class, unless the class writes its own `propagate`.
    if cls.propagate is not cls._jinja_propagate or cls._jinja_propagate is cls._orig_propagate:
        return "it overrides propagate"
    return None


def _read_weights(conv: MessagePassing) -> list[int]:
    """Return the ids of the modules that the forward reads itself, and that must not be packed: the network of an EdgeConv and
    its first linear."""
    from torch_geometric.nn import EdgeConv

    from hf_cpu_accel.graph.edge_networks import first_linear

    first = first_linear(conv.nn) if isinstance(conv, EdgeConv) else None
    return [] if first is None else [id(conv.nn), id(first)]


def _update_gathers(conv: MessagePassing) -> bool:
    """Return whether `update` needs more than unchanged arguments of `propagate`."""
    names = conv.inspector.get_param_names("update", exclude=[])
    special = {*conv.special_args, "edge_index"}
    return any(name in special or name.endswith(("_i", "_j")) for name in names)


def _describe(message: Message | None) -> str:
    if message is None:
        return "custom messages"
    return "source rows" if message.weight is None else "source rows x weight"
