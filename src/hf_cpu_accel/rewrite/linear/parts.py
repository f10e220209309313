"""Parts of a small container: linears, an activation, a norm, and no other computation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel.check import compare
from hf_cpu_accel.hosts.arguments import parameters_of
from hf_cpu_accel.patching.hooks import is_plain
from hf_cpu_accel.rewrite.core.activations import identify, is_library_function
from hf_cpu_accel.rewrite.core.context import Context, linear_refusal
from hf_cpu_accel.rewrite.core.verify import probe, run_alone
from hf_cpu_accel.rewrite.norm.match import NormSpec, identify_norm
from hf_cpu_accel.tolerance import FORMULA


@dataclass(frozen=True)
class Parts:
    """The parts of a container.

    Attributes:
        linears: (name, module) of the linears, which can all be packed.
        activation: name of the activation, `"none"` without one.
        norm: (name, spec) of the norm, or None.
        inputs: names of the parameters of its forward.
    """

    linears: tuple[tuple[str, nn.Linear], ...]
    activation: str
    norm: tuple[str, NormSpec] | None
    inputs: tuple[str, ...]


def take_apart(module: nn.Module, path: str, context: Context) -> Parts | None:
    """Return the parts of `module`, or None if it holds anything else, or a linear that cannot be packed.

    Whether it *computes* the same as its parts suggest is checked by `computes`.
    """
    if module._parameters or module._buffers or not context.tree.slots[id(module)] or not is_plain(module):
        return None
    linears: list[tuple[str, nn.Linear]] = []
    norms: list[tuple[str, NormSpec]] = []
    activations = _activation_functions(module)
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            linears.append((name, child))
        elif isinstance(child, nn.Dropout | nn.Identity):
            continue
        elif (activation := identify(child)) is not None:
            activations.append(activation)
        elif is_plain(child) and (norm := identify_norm(child)) is not None:
            norms.append((name, norm))
        else:
            return None
    inputs = _required_inputs(module)
    if not linears or inputs is None or len(activations) > 1 or len(norms) > 1:
        return None
    if any(linear_refusal(linear, f"{path}.{name}", context) is not None for name, linear in linears):
        return None
    activation = activations[0] if activations else "none"
    return Parts(tuple(linears), activation, norms[0] if norms else None, inputs)


def computes(module: nn.Module, inputs: tuple[Tensor, ...], expected: Tensor | None) -> bool:
    """Return whether `module` returns the values of `expected` for `inputs`, to verify a candidate."""
    return expected is not None and compare(run_alone(module, *inputs), expected).within(FORMULA)


def plain_linear(linear: nn.Linear, input: Tensor) -> Tensor:
    """Compute the linear as a formula, without the module's hooks."""
    bias = None if linear.bias is None else linear.bias.detach()
    return functional.linear(input, linear.weight.detach(), bias)


def probes(linear: nn.Linear, count: int) -> tuple[Tensor, ...]:
    """Return `count` inputs: one for the linear, then residuals of the size of its output."""
    shapes = (linear.in_features, linear.out_features)
    return tuple(probe(shapes[number], linear.weight.dtype, seed=number) for number in range(count))


def _activation_functions(module: nn.Module) -> list[str]:
    """Return activations that are attributes as plain functions instead of modules."""
    functions = [
        value
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and is_library_function(value)
    ]
    names = [identify(function) for function in functions]
    return [name for name in names if name is not None]


def _required_inputs(module: nn.Module) -> tuple[str, ...] | None:
    """Return the names of the parameters of forward, or None if some are optional: they could change its result."""
    parameters = parameters_of(module.forward).values()
    if any(
        parameter.default is not parameter.empty or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD
        for parameter in parameters
    ):
        return None
    return tuple(parameter.name for parameter in parameters)
