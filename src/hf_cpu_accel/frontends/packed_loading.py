"""Load a packed file into an accelerated model; packed parameters are placeholders until the other parameters are loaded."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_cpu_accel.config import CPUAccelConfig
from hf_cpu_accel.hosts.find import find
from hf_cpu_accel.lifecycle import accelerate_roots, lock
from hf_cpu_accel.measure.dtype_choice import Choice
from hf_cpu_accel.packing.packed_file import PackedModelFile
from hf_cpu_accel.packing.saved_weight import SavedWeight
from hf_cpu_accel.packing.tensor_file import DamagedFile
from hf_cpu_accel.patching.acceleration import acceleration_of
from hf_cpu_accel.patching.originals import NoStore
from hf_cpu_accel.rewrite.core.packed_source import PackedSource, mark_placeholder, placeholders


@dataclass(frozen=True)
class _Place:
    """A packed parameter of a module, and the names of all parameters of the module in their order."""

    module: nn.Module
    name: str
    order: tuple[str, ...]


class PackedLoading:
    """The loading of one model.

    Between `begin` and `finish`, packed parameters are not parameters of the model, so that they are not allocated or initialized.
    """

    def __init__(self, file: PackedModelFile) -> None:
        self._file = file
        self._weights: tuple[SavedWeight, ...] = ()
        self._places: list[tuple[_Place, nn.Parameter]] = []

    @property
    def path(self) -> Path:
        """Return the path of the file."""
        return self._file.path

    @property
    def plain(self) -> Mapping[str, Tensor]:
        """Return the parameters and buffers that are not packed, {path: tensor}."""
        return self._file.plain

    def begin(self, model: nn.Module, tied: Sequence[str] = ()) -> None:
        """Remove the packed parameters from a model on the meta device.

        Args:
            model: the model.
            tied: paths of parameters that the host ties to other parameters.

        Raises:
            DamagedFile: the weights do not fit the model.
        """
        self._weights = tuple(_for_model(weight, model) for weight in self._file.weights)
        self._weights = tuple(weight for weight in self._weights if weight.parameters)
        paths = [path for weight in self._weights for path in weight.parameters if path not in tied]
        parameters = [model.get_parameter(path) for path in paths]
        for weight in self._weights:
            self._check_size(weight, model)
        places = [_place(model, path) for path in paths]
        for place, placeholder in zip(places, placeholders(parameters), strict=True):
            mark_placeholder(placeholder)
            placeholder._is_hf_initialized = True  # type: ignore[attr-defined]  # read by transformers
            del place.module._parameters[place.name]
            place.module.__dict__[place.name] = placeholder
            self._places.append((place, placeholder))

    def finish(self, model: nn.Module) -> None:
        """Accelerate a model, whose other parameters are loaded, with the packed weights of the file.

        Raises:
            ValueError: the model cannot be accelerated with the settings of the file.
        """
        for place, placeholder in self._places:
            del place.module.__dict__[place.name]
            parameters = {**place.module._parameters, place.name: placeholder}
            place.module._parameters = {name: parameters[name] for name in place.order if name in parameters}
        self._places = []
        settings = self._settings()
        source = PackedSource(model, self._weights)
        with lock, torch.inference_mode(False):
            accelerate_roots(
                find(model), settings, saved=(source, NoStore(self._file.path)), choices=self._choices()
            )
        self._compare_plans(model)

    def _settings(self) -> CPUAccelConfig:
        try:
            return CPUAccelConfig.from_dict(self._file.about["config"])
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFile(
                f"{self._file.path} was packed with settings that this version of hf_cpu_accel does not support: {error}; pack the "
                "model again"
            ) from error

    def _choices(self) -> list[Choice] | None:
        """Return the choice of dtypes for an accuracy, for `explain`; None without a choice."""
        try:
            choices = [Choice.from_dict(fields) for fields in self._file.about.get("choices", ())[:1]]
            for choice in choices:
                CPUAccelConfig(dtype=choice.dtype, dtypes=choice.dtypes)  # checks the names of the dtypes
            return [*choices] or None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DamagedFile(
                f"{self._file.path} contains an invalid choice of dtypes: {error}; pack the model again"
            ) from error

    def _check_size(self, weight: SavedWeight, model: nn.Module) -> None:
        parameters = [model.get_parameter(path) for path in weight.parameters]
        values, packed = sum(map(Tensor.numel, parameters)), weight.packed
        if values != packed.in_features * packed.out_features:
            shapes = [tuple(parameter.shape) for parameter in parameters]
            raise DamagedFile(
                f"{self._file.path} does not fit this model: {weight.parameters[0]} is packed as "
                f"{packed.out_features} x {packed.in_features}, but config.json requires {shapes}. Nothing was loaded"
            )

    def _compare_plans(self, model: nn.Module) -> None:
        """Warn if other layers are fused than when the model was saved; outputs may be rounded differently."""
        acceleration = acceleration_of(model)
        assert acceleration is not None
        before = {tuple(row) for row in self._file.about.get("plan", ())}
        gone = sorted(before - plan_rows(model))
        if gone and self._file.about.get("model") == type(model).__name__:
            name, structure, op = gone[0]
            warnings.warn(
                f"{self._file.path}: {len(gone)} of {len(before)} modules run another op than when the model was packed, for "
                f"example {name} ({structure} by {op}). The reason is another machine, or another version of hf_cpu_accel or its "
                "host. The weights are identical; see hf_cpu_accel.explain(model)",
                RuntimeWarning,
                stacklevel=2,
            )


def plan_rows(model: nn.Module) -> set[tuple[str, str, str]]:
    """Return (path, structure, op) of the replaced modules of an accelerated model."""
    acceleration = acceleration_of(model)
    assert acceleration is not None
    # The structure may end with the source of the weight in brackets.
    return {(item.name, item.structure.partition(" (")[0], item.op) for item in acceleration.plan.replaced}


def _place(model: nn.Module, path: str) -> _Place:
    module_path, _, name = path.rpartition(".")
    module = model.get_submodule(module_path)
    return _Place(module, name, tuple(module._parameters))


def _for_model(weight: SavedWeight, model: nn.Module) -> SavedWeight:
    """Return `weight` with the paths of its parameters in `model`, which may lack the head of the saved model or have one more."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for change in (str, lambda path: path.removeprefix(prefix), lambda path: prefix + path):
        paths = tuple(change(path) for path in weight.parameters)
        if all(_has(model, path) for path in paths):
            return dataclasses.replace(weight, parameters=paths)
    return dataclasses.replace(weight, parameters=())


def _has(model: nn.Module, path: str) -> bool:
    try:
        model.get_parameter(path)
    except AttributeError:
        return False
    return True
