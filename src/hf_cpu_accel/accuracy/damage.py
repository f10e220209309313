"""Which packed weights of a model round most: the error of each on its own, on what it is given in the examples."""

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
    """Modules that are packed in one dtype, since they are computed as one: query, key and value, or all experts.

    Attributes:
        modules: their paths.
        weights: the paths of their weights.
    """

    modules: tuple[str, ...]
    weights: tuple[str, ...]


def units_of(root: nn.Module) -> list[Unit]:
    """Those of an accelerated model that are packed narrower than float32, in the order of their paths."""
    weights: dict[tuple[str, ...], list[str]] = {}
    for weight in saved_weights(root):
        if weight.packed.dtype != "float32":
            modules = tuple(dict.fromkeys(path.rpartition(".")[0] for path in weight.parameters))
            weights.setdefault(modules, []).extend(weight.parameters)
    return sorted(
        (Unit(modules, tuple(paths)) for modules, paths in weights.items()), key=lambda u: u.modules
    )


def ranked(
    model: nn.Module, run: Callable[[], None], units: Sequence[Unit], dtype: str, group: int
) -> list[Unit]:
    """`units` by the error that packing as `dtype` makes in their outputs, the largest first.

    It takes one pass over the examples, and memory for 64 rows of each layer's input. Of what is no linear, and was not called, the
    error of the weight itself stands for that of the output.

    Args:
        model: as it was made, with the weights of all `units`.
        run: calls it with the examples.
    """
    layers = linears_of(model)
    wanted = {path: layers[path] for unit in units for path in unit.modules if path in layers}
    sample = RowSample()
    with layer_inputs(wanted, sample):
        run()
    rows = sample.rows()
    errors = {unit: _error(model, unit, rows, dtype, group) for unit in units}
    return sorted(units, key=lambda unit: (-errors[unit], unit.modules))


def _error(model: nn.Module, unit: Unit, rows: dict[str, Tensor], dtype: str, group: int) -> float:
    """Relative to the length of the outputs, of all rows together."""
    wrong = right = 0.0
    for weight, path in _weights(model, unit):
        given = rows.get(path)
        packed = pack_linear(weight, nearest_form(weight, dtype, group), int4_group=group)
        if given is None:
            difference, expected = unpack_linear(packed) - weight, weight
        else:
            input = given.float()
            expected = input @ weight.T
            difference = linear(input, packed, None) - expected
        wrong += difference.double().square().sum().item()
        right += expected.double().square().sum().item()
    return (wrong / right) ** 0.5 if right > 0 else 0.0


def _weights(model: nn.Module, unit: Unit) -> Iterator[tuple[Tensor, str]]:
    """(weight as a float32 matrix [out_features, in_features], path of the module) of each."""
    for path in unit.weights:
        module_path = path.rpartition(".")[0]
        weight = model.get_parameter(path).detach().float()
        module = model.get_submodule(module_path)
        if weight.dim() == 3 and not isinstance(module, nn.Conv1d):
            weight = weight.flatten(0, 1)  # of all experts
        weight = weight.flatten(1)
        is_transposed = weight.dim() == 2 and type(module).__name__ == "Conv1D"
        yield weight.T.contiguous() if is_transposed else weight, module_path
