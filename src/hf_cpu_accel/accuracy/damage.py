"""Rank the packed weights of a model by the error that each causes alone, on its inputs in the examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from hf_cpu_accel.measure.layer_inputs import RowSample, layer_inputs, linears_of
from hf_cpu_accel.ops.linear import linear
from hf_cpu_accel.packing.four_bits import nearest_form
from hf_cpu_accel.packing.linear import pack_linear, unpack_linear
from hf_cpu_accel.rewrite.saved import saved_weights


@dataclass(frozen=True)
class Unit:
    """Modules that share one dtype because they are computed together: query, key and value, or all experts.

    Attributes:
        modules: paths of the modules.
        weights: paths of their weights.
    """

    modules: tuple[str, ...]
    weights: tuple[str, ...]


def units_of(root: nn.Module) -> list[Unit]:
    """Return the units of an accelerated model that are packed in fewer bits than float32, in the order of their paths."""
    weights: dict[tuple[str, ...], list[str]] = {}
    for weight in saved_weights(root):
        if weight.packed.dtype != "float32":
            modules = tuple(dict.fromkeys(path.rpartition(".")[0] for path in weight.parameters))
            weights.setdefault(modules, []).extend(weight.parameters)
    return sorted(
        (Unit(modules, tuple(paths)) for modules, paths in weights.items()), key=lambda u: u.modules
    )


def rank(
    model: nn.Module, run: Callable[[], None], units: Sequence[Unit], dtype: str, group: int
) -> list[Unit]:
    """Sort units by the error of their outputs when packed as `dtype`, the largest first.

    It needs one pass over the examples, and memory for 64 rows of the input of each layer. For modules that are not linears or that
    were not called, the error of the weight replaces that of the output.

    Args:
        model: the original model with the weights of all units.
        run: calls it with the examples.
        units: the units.
        dtype: the dtype.
        group: group size of int4.
    """
    layers = linears_of(model)
    observed = {path: layers[path] for unit in units for path in unit.modules if path in layers}
    sample = RowSample()
    with layer_inputs(observed, sample):
        run()
    rows = sample.rows()
    errors = {unit: _error(model, unit, rows, dtype, group) for unit in units}
    return sorted(units, key=lambda unit: (-errors[unit], unit.modules))


def _error(model: nn.Module, unit: Unit, rows: dict[str, Tensor], dtype: str, group: int) -> float:
    """Return the error of the outputs over all rows, relative to their length."""
    error = length = 0.0
    for weight, path in _weights(model, unit):
        inputs = rows.get(path)
        packed = pack_linear(weight, nearest_form(weight, dtype, group), int4_group=group)
        if inputs is None:
            difference, expected = unpack_linear(packed) - weight, weight
        else:
            input = inputs.float()
            expected = input @ weight.T
            difference = linear(input, packed, None) - expected
        error += difference.double().square().sum().item()
        length += expected.double().square().sum().item()
    return (error / length) ** 0.5 if length > 0 else 0.0


def _weights(model: nn.Module, unit: Unit) -> Iterator[tuple[Tensor, str]]:
    """Yield (float32 matrix [out_features, in_features], path of the module) for each weight."""
    for path in unit.weights:
        module_path = path.rpartition(".")[0]
        weight = model.get_parameter(path).detach().float()
        module = model.get_submodule(module_path)
        if weight.dim() == 3 and not isinstance(module, nn.Conv1d):
            weight = weight.flatten(0, 1)  # of all experts
        weight = weight.flatten(1)
        is_transposed = weight.dim() == 2 and type(module).__name__ == "Conv1D"
        yield weight.T.contiguous() if is_transposed else weight, module_path
