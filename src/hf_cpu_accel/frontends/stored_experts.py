"""Quantized experts that a file stores one by one, while transformers has one parameter for all experts.

The converters of transformers join only plain weights. So each expert is loaded into a linear with its name in the file. When all
experts are loaded, one parameter over their tensors replaces the linears.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from hf_cpu_accel.checkpoints.formats import Checkpoint
from hf_cpu_accel.checkpoints.layout import UnreadableCheckpoint
from hf_cpu_accel.checkpoints.stored_linear import StoredLinear
from hf_cpu_accel.checkpoints.stored_stack import LinearsStack, Parts


@dataclass(frozen=True)
class JoinedExperts:
    """A parameter of the model that joins linears of experts.

    Attributes:
        path: path of the module.
        name: name of the parameter.
        parts: names of the linears of each expert.
        like: the original parameter.
    """

    path: str
    name: str
    parts: tuple[str, ...]
    like: nn.Parameter


def put_linears(
    model: Any, stored: Mapping[str, dict[str, Tensor]], checkpoint: Checkpoint
) -> list[JoinedExperts]:
    """Replace the parameters of quantized experts by one linear per expert, into which the files are loaded.

    Args:
        model: the model.
        stored: the tensors in the files, {path of a module: {name: tensor}}.
        checkpoint: the quantization format.

    Returns:
        The parameters to join with `join_linears`.

    Raises:
        UnreadableCheckpoint: some experts are missing, or have other shapes.
    """
    joined = []
    for path, name, parts in list(_parameters(model)):
        module = model.get_submodule(path)
        like = module._parameters[name]
        experts, rows, columns = like.shape
        paths = [[f"{path}.{number}.{part}" for part in parts] for number in range(experts)]
        if not any(set(stored.get(at, ())) & set(checkpoint.marks) for row in paths for at in row):
            continue
        for number, row in enumerate(paths):
            for part, at in zip(parts, row, strict=True):
                layout = checkpoint.layout(at, rows // len(parts), columns, stored.get(at, {}))
                if layout is None:
                    raise UnreadableCheckpoint(
                        f"{at} is not quantized, but other experts of the layer are; this is not supported"
                    )
                container = module._modules.setdefault(str(number), nn.Module())
                container.add_module(part, StoredLinear(layout, None))
                container._is_hf_initialized = True
        del module._parameters[name]
        module._is_hf_initialized = True  # there are no parameters to initialize
        joined.append(JoinedExperts(path, name, parts, like))
    return joined


def join_linears(model: nn.Module, joined: list[JoinedExperts]) -> None:
    """Replace the loaded linears by the joined parameters."""
    for one in joined:
        module: Any = model.get_submodule(one.path)
        experts: list[Parts] = []
        tensors: dict[str, Tensor] = {}
        for number in range(len(one.like)):
            linears = [(part, module.get_submodule(f"{number}.{part}")) for part in one.parts]
            experts.append(tuple((part, linear.layout) for part, linear in linears))
            for part, linear in linears:
                tensors |= {f"{number}.{part}.{name}": tensor for name, tensor in linear.tensors.items()}
        stack = LinearsStack(tuple(experts), tensors, one.like.dtype)
        stack.check()
        module.register_parameter(one.name, nn.Parameter(stack, requires_grad=False))
    for path in dict.fromkeys(one.path for one in joined):
        module = model.get_submodule(path)
        for name in [name for name in module._modules if name.isdigit()]:
            del module._modules[name]
        module.register_state_dict_post_hook(_restore_file_names)


def _parameters(model: Any) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield (path of the module, name, names of an expert's linears) of the parameters that transformers joins from experts."""
    kinds = ([MergeModulelist], [MergeModulelist, Concatenate])
    for converter in get_model_conversion_mapping(model):
        if not isinstance(converter, WeightConverter) or [type(o) for o in converter.operations] not in kinds:
            continue
        sources, targets = converter._original_source_patterns, converter._original_target_patterns
        prefix, _, name = targets[0].rpartition(".")
        parts = [source.removeprefix(f"{prefix}.*.").removesuffix(".weight") for source in sources]
        if len(targets) != 1 or any("." in part or "*" in part for part in parts):
            continue
        for path, parameter in model.named_parameters():
            if parameter.dim() == 3 and path.endswith(f"{prefix}.{name}".lstrip(".")):
                yield path.rpartition(".")[0], name, tuple(parts)


def _restore_file_names(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Replace joined experts in a state dict by their tensors with the names in the file."""
    for name in [name for name, value in state.items() if isinstance(value, LinearsStack)]:
        if name.startswith(prefix):
            stack = state.pop(name)
            state.update({f"{prefix}{part}": tensor for part, tensor in stack.held.items()})
