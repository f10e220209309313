"""From a packed file to an accelerated model: its parameters wait as placeholders until the others are loaded."""

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
    """A parameter of a module that is in the file, and the names of the module's parameters in their order."""

    module: nn.Module
    name: str
    order: tuple[str, ...]


class PackedLoading:
    """The loading of one model.

    Between `begin` and `finish` the parameters that are packed are no parameters of the model, so that they are neither allocated
    nor initialized.
    """

    def __init__(self, file: PackedModelFile) -> None:
        self._file = file
        self._weights: tuple[SavedWeight, ...] = ()
        self._places: list[tuple[_Place, nn.Parameter]] = []

    @property
    def path(self) -> Path:
        """Of the file."""
        return self._file.path

    @property
    def plain(self) -> Mapping[str, Tensor]:
        """The parameters and buffers that are not packed, by their paths."""
        return self._file.plain

    def begin(self, model: nn.Module, tied: Sequence[str] = ()) -> None:
        """Take the packed parameters out of `model`, which is on the meta device.

        Args:
            tied: paths of parameters that the host makes those of other modules.

        Raises:
            DamagedFile: the weights are not those of such a model.
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
            placeholder._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers asks for that
            del place.module._parameters[place.name]
            place.module.__dict__[place.name] = placeholder
            self._places.append((place, placeholder))

    def finish(self, model: nn.Module) -> None:
        """Accelerate `model`, whose other parameters are loaded, with the packed weights of the file.

        Raises:
            ValueError: it cannot be accelerated as it was when it was saved.
        """
        for place, placeholder in self._places:
            del place.module.__dict__[place.name]
            held = {**place.module._parameters, place.name: placeholder}
            place.module._parameters = {name: held[name] for name in place.order if name in held}
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
                f"{self._file.path} was packed with settings that this version does not have: {error}"
            ) from error

    def _choices(self) -> list[Choice] | None:
        """What was chosen for an accuracy, for `explain` to tell; None if nothing was."""
        try:
            choices = [Choice.from_dict(fields) for fields in self._file.about.get("choices", ())[:1]]
            for choice in choices:
                CPUAccelConfig(dtype=choice.dtype, dtypes=choice.dtypes)  # which knows the names
            return [*choices] or None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DamagedFile(
                f"{self._file.path}: what it says of the choice of dtypes is unknown: {error}"
            ) from error

    def _check_size(self, weight: SavedWeight, model: nn.Module) -> None:
        parameters = [model.get_parameter(path) for path in weight.parameters]
        values, packed = sum(map(Tensor.numel, parameters)), weight.packed
        if values != packed.in_features * packed.out_features:
            shapes = [tuple(parameter.shape) for parameter in parameters]
            raise DamagedFile(
                f"{self._file.path} is not of this model: {weight.parameters[0]} is packed as "
                f"{packed.out_features} x {packed.in_features}, and config.json makes it {shapes}. Nothing was loaded"
            )

    def _compare_plans(self, model: nn.Module) -> None:
        """Say so where another layer is fused than when the model was saved: it answers, and may round otherwise."""
        acceleration = acceleration_of(model)
        assert acceleration is not None
        before = {tuple(row) for row in self._file.about.get("plan", ())}
        gone = sorted(before - plan_rows(model))
        if gone and self._file.about.get("model") == type(model).__name__:
            name, structure, op = gone[0]
            warnings.warn(
                f"{self._file.path}: {len(gone)} of {len(before)} modules are not computed as when the model was packed, {name} "
                f"({structure} by {op}) among them: another machine, or another version of hf_cpu_accel or its host. The weights "
                "are the same; see hf_cpu_accel.explain(model)",
                RuntimeWarning,
                stacklevel=2,
            )


def plan_rows(model: nn.Module) -> set[tuple[str, str, str]]:
    """(path, structure, op) of what was replaced in an accelerated model."""
    acceleration = acceleration_of(model)
    assert acceleration is not None
    # In brackets stands where a weight came from.
    return {(item.name, item.structure.partition(" (")[0], item.op) for item in acceleration.plan.replaced}


def _place(model: nn.Module, path: str) -> _Place:
    above, _, name = path.rpartition(".")
    module = model.get_submodule(above)
    return _Place(module, name, tuple(module._parameters))


def _for_model(weight: SavedWeight, model: nn.Module) -> SavedWeight:
    """With the paths that the parameters have in `model`, which may be the saved one without its head, or with one."""
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
