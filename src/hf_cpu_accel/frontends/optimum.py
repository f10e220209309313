"""Classes `CPUModelFor<Task>` like those of optimum: load with transformers, then accelerate.

    from hf_cpu_accel import CPUModelForSequenceClassification

    model = CPUModelForSequenceClassification.from_pretrained("path-or-id", cpu_optimize="int8")
    pipe = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)
    model.save_pretrained("folder")      # an ordinary checkpoint and cpu_accel_config.json

They follow `OptimizedModel` of optimum, so that code for another of its backends changes only a class name. The classes are
generated from the table in `frontends.tasks`. Importing this module imports transformers and optimum.
"""

from __future__ import annotations

import copy
import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_cpu_accel import api
from hf_cpu_accel.config import FILE_NAME, CPUAccelConfig
from hf_cpu_accel.frontends.keyword import cpu_config, examples_in
from hf_cpu_accel.frontends.optimum_arguments import check_device, translate_arguments
from hf_cpu_accel.frontends.optimum_saving import Saved
from hf_cpu_accel.frontends.placement import check_placement, without_strategy
from hf_cpu_accel.frontends.quantized_folders import weights_as_stored
from hf_cpu_accel.frontends.tasks import CLASS_NAMES, TASKS, Task
from hf_cpu_accel.hosts.find import Root
from hf_cpu_accel.patching.acceleration import acceleration_of

try:
    from optimum.modeling_base import OptimizedModel
except ImportError as error:
    raise ImportError(
        f"CPUModelFor<Task> needs optimum, which could not be imported ({error}); "
        "install it with: pip install hf_cpu_accel[optimum]"
    ) from error

import torch
import transformers
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.utils import cached_file


class CPUModel(Saved, OptimizedModel):
    """A transformers model that is accelerated for the CPU, with the interface of optimum.

    Args:
        model: a loaded transformers model in eval mode on the CPU, which is accelerated in place.
        config: its configuration; None for `model.config`.
        preprocessors: tokenizers or processors that `save_pretrained` writes next to the model.
        cpu_optimize: a bool, a dtype name, a `CPUAccelConfig`, or a dict of its fields; False for the plain model.

    Attributes:
        model: the transformers model. Attributes that this class does not define (`device`, `dtype`, `num_parameters()`, ...) are
            those of the model.
    """

    auto_model_class = transformers.AutoModel
    base_model_prefix = "cpu_model"

    def __init__(
        self,
        model: PreTrainedModel,
        config: PretrainedConfig | None = None,
        preprocessors: list[Any] | None = None,
        cpu_optimize: bool | str | dict[str, Any] | CPUAccelConfig | None = True,
    ) -> None:
        settings = cpu_config(cpu_optimize)
        super().__init__(model, model.config if config is None else config, preprocessors)
        if settings is not None:
            api.accelerate_for_cpu(model, settings, examples=examples_in(cpu_optimize))

    @property
    def cpu_config(self) -> CPUAccelConfig | None:
        """Return the current settings; None if the model is not accelerated."""
        acceleration = acceleration_of(self.model)
        return None if acceleration is None else acceleration.config

    @property
    def config(self) -> PretrainedConfig:
        """Return `model.config`."""
        return self.model.config

    @config.setter
    def config(self, value: PretrainedConfig) -> None:
        self.model.config = value

    @property
    def generation_config(self) -> GenerationConfig:
        """Return `model.generation_config`."""
        return self.model.generation_config

    @generation_config.setter
    def generation_config(self, value: GenerationConfig) -> None:
        self.model.generation_config = value

    @property
    def use_cache(self) -> bool:
        """Return whether `generate` uses a KV cache."""
        return self.can_generate() and self.generation_config.use_cache is not False

    @classmethod
    def _from_pretrained(
        cls,
        model_id: str | Path,
        config: PretrainedConfig | None = None,
        subfolder: str = "",
        revision: str = "main",
        force_download: bool = False,
        local_files_only: bool = False,
        trust_remote_code: bool = False,
        cache_dir: str | None = None,
        token: bool | str | None = None,
        cpu_optimize: bool | str | dict[str, Any] | CPUAccelConfig | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> CPUModel:
        """Load a model with the auto class, then accelerate it; `from_pretrained` calls this.

        Args:
            model_id: name on the Hub or a folder.
            config: configuration of the model.
            subfolder, revision, force_download, local_files_only, trust_remote_code, cache_dir, token: as in transformers.
            cpu_optimize: a bool, a dtype name, a `CPUAccelConfig`, or a dict of its fields. None for the cpu_accel_config.json next
                to the weights, or else the default configuration.
            use_cache: whether `generate` uses a KV cache; None for the setting of the model.
            **kwargs: as in transformers: fields of the configuration (`num_labels=3`) override it, other arguments are passed to
                the auto class (`dtype=`, `attn_implementation=`, ...). Arguments of optimum's other backends are translated or
                rejected, see `optimum_arguments`.

        Raises:
            TypeError, ValueError: an invalid `cpu_optimize`, or a `device_map` with other devices than the CPU; nothing is loaded.
        """
        hub = {
            "subfolder": subfolder,
            "revision": revision,
            "force_download": force_download,
            "local_files_only": local_files_only,
            "cache_dir": cache_dir,
            "token": token,
        }
        kwargs, cpu_optimize = translate_arguments(kwargs, cpu_optimize)
        accel = _saved_config(model_id, hub) if cpu_optimize is None else cpu_config(cpu_optimize)
        if accel is not None:
            kwargs = without_strategy(kwargs)
            check_placement(device_map=kwargs.get("device_map"))
        config = copy.deepcopy(config)
        for name in [
            name for name in kwargs if name not in ("dtype", "torch_dtype") and hasattr(config, name)
        ]:
            setattr(config, name, kwargs.pop(name))
        with nullcontext() if accel is None else weights_as_stored():
            model = cls.auto_model_class.from_pretrained(
                model_id, config=config, trust_remote_code=trust_remote_code, **hub, **kwargs
            )
        if use_cache is not None and model.can_generate():
            model.generation_config.use_cache = use_cache
        return cls(model, cpu_optimize=accel if cpu_optimize is None else cpu_optimize)

    # There is no other format, so `export=True`, which is common with other backends, loads in the same way.
    _export = _from_pretrained

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of `model`, with its arguments and outputs."""
        return self.model(*args, **kwargs)

    def restore(self) -> CPUModel:
        """Restore the original model with `hf_cpu_accel.restore`, and return self."""
        api.restore(self.model)
        return self

    def can_generate(self) -> bool:
        """Return whether the model can generate; `generate` is that of `model`, with a faster KV cache and loops."""
        return bool(self.model.can_generate())

    def eval(self) -> CPUModel:
        """Set the model to eval mode, and return self."""
        self.model.eval()
        return self

    def half(self) -> CPUModel:
        """Accelerate the model in bfloat16 if it is packed in float32, and return self; fewer bits stay unchanged."""
        settings = self.cpu_config
        if settings is None:
            self.model.half()
        elif api.explain(self.model).dtype == "float32":
            api.accelerate_for_cpu(self.model, dataclasses.replace(settings, dtype="bfloat16", accuracy=None))
        return self

    def compile(self) -> None:
        """Do nothing: no engine needs a preparation."""

    def reshape(self, *shape: Any, **shapes: Any) -> CPUModel:
        """Return self unchanged: the model accepts inputs of any shape."""
        return self

    def to(self, device: str | int | torch.device) -> CPUModel:
        """Return self unchanged: the model is on the CPU.

        Raises:
            ValueError: another device, or a dtype.
        """
        if isinstance(device, torch.dtype):
            raise ValueError(
                f"to({device!r}) is not supported by {type(self).__name__}: set the dtype with CPUAccelConfig(dtype=...)"
            )
        check_device(device)
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "model" or name.startswith("__"):  # not set yet (copy, pickle): no recursion
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.model, name)


def roots(target: object) -> tuple[Root, ...] | None:
    """Return the torch model of a `CPUModel`; None for another target."""
    if not isinstance(target, CPUModel):
        return None
    return (Root(target.model, "optimum", (target.model,)),)


def _saved_config(model_id: str | Path, hub: dict[str, Any]) -> CPUAccelConfig:
    """Return the configuration that `save_pretrained` wrote next to the weights (folder or Hub), or the default one."""
    file = cached_file(
        str(model_id),
        FILE_NAME,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **hub,
    )
    return CPUAccelConfig() if file is None else CPUAccelConfig.load(Path(file).parent)


def _make_class(task: Task) -> type[CPUModel]:
    doc = f"""A model of `transformers.{task.auto_class}` that is accelerated for the CPU.

    The forward pass returns {task.outputs}.
    See `CPUModel` for the arguments and `from_pretrained` / `save_pretrained` / `push_to_hub`.
    """
    auto_class = getattr(transformers, task.auto_class)
    cls = type(
        task.class_name, (CPUModel,), {"__doc__": doc, "__module__": __name__, "auto_model_class": auto_class}
    )
    # optimum registers its classes in transformers under AutoConfig. No model has this configuration class, so nothing is loaded
    # by it.
    auto_class.register(AutoConfig, cls, exist_ok=True)
    if task.pipeline_models is not None:
        getattr(modeling_auto, task.pipeline_models, {})[f"hf_cpu_accel.{task.name}"] = task.class_name
    return cls


for _task in TASKS:
    _class = _make_class(_task)
    globals().update(dict.fromkeys(_task.class_names, _class))

__all__ = [*CLASS_NAMES]

if TYPE_CHECKING:

    def __getattr__(name: str) -> type[CPUModel]: ...
