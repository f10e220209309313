"""The keyword `cpu_optimize=`: load and accelerate in one call.

    model = AutoModelForSequenceClassification.from_pretrained(path, cpu_optimize=True)
    pipe = transformers.pipeline("fill-mask", path, cpu_optimize="int8")

Accepted values (`cpu_config`): True (the defaults), a dtype name ("bfloat16"), a `CPUAccelConfig`, or a dict of its fields, which
may contain `examples` for `accuracy`. False and None leave the call unchanged. The value is checked before anything is loaded. Then
the host loads the object, and `accelerate_for_cpu` accelerates it.

`PATCHES` is the table that `frontends.import_hook` applies. A new host needs one more line, after `accelerate_for_cpu` supports it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_cpu_accel import api
from hf_cpu_accel.accuracy.examples import check_examples
from hf_cpu_accel.config import CPUAccelConfig
from hf_cpu_accel.frontends import gguf, mxfp4, packed_saving
from hf_cpu_accel.frontends.forecast import forecasting, patch_loader
from hf_cpu_accel.frontends.placement import KEYWORD, check_placement, without_strategy
from hf_cpu_accel.frontends.quantized_folders import patch_quantizer_choice, weights_as_stored
from hf_cpu_accel.runtime.fork import new_reentrant_lock

if TYPE_CHECKING:
    from hf_cpu_accel.frontends.patches import HostPatches, Patch

# transformers replaces methods of its classes during a load (`no_tie_weights`). If two loads overlapped, the second could leave the
# replacements in place.
_one_at_a_time = new_reentrant_lock()

_EXAMPLES = "examples"  # an argument of `accelerate_for_cpu`, not a field of the config

AcceleratedCall = Callable[[Callable[[Any], Any], tuple[Any, ...], dict[str, Any]], Any]
"""The function that runs instead of a wrapped function if the keyword is set: (accelerate, args, kwargs) -> result."""


def cpu_config(value: object) -> CPUAccelConfig | None:
    """Return the configuration for a value of `cpu_optimize=`; None if nothing is to be accelerated.

    Args:
        value: None or False for nothing, True for the defaults, a dtype name, a `CPUAccelConfig`, or a dict of its fields, which
            may contain `examples`, see `examples_in`.

    Raises:
        TypeError: a value of another type.
        ValueError: a dtype or field that `CPUAccelConfig` does not accept.
    """
    if value is None or value is False:
        return None
    if value is True:
        return CPUAccelConfig()
    if isinstance(value, CPUAccelConfig):
        return value
    if isinstance(value, str):
        return CPUAccelConfig(dtype=value)
    if isinstance(value, Mapping):
        return CPUAccelConfig.from_dict({name: field for name, field in value.items() if name != _EXAMPLES})
    raise TypeError(
        f"{KEYWORD}={value!r} has the type {type(value).__name__}; accepted: a bool, a dtype name such as "
        "'bfloat16', a CPUAccelConfig, or a dict of its fields"
    )


def examples_in(value: object) -> Any:
    """Return the examples for `accuracy` in a dict of fields; None without examples."""
    return value.get(_EXAMPLES) if isinstance(value, Mapping) else None


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of `function` with the new keyword before its `**kwargs`."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    at = next((i for i, p in enumerate(parameters) if p.kind is p.VAR_KEYWORD), len(parameters))
    new = inspect.Parameter(
        KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation="bool | str | dict | CPUAccelConfig | None",
    )
    return signature.replace(parameters=[*parameters[:at], new, *parameters[at:]])


def with_keyword(
    function: Callable[..., Any], patches: HostPatches, call: AcceleratedCall
) -> Callable[..., Any]:
    """Add the keyword to `function`: with it, `call(accelerate, args, kwargs)` runs instead of the function."""

    @functools.wraps(function)
    def wrapper(*args: Any, cpu_optimize: Any = None, **kwargs: Any) -> Any:
        if not patches.active:
            # After `uninstall`, a copied wrapper behaves like the original, which does not support the keyword.
            extra = {} if cpu_optimize is None else {KEYWORD: cpu_optimize}
            return function(*args, **extra, **kwargs)
        config, examples = cpu_config(cpu_optimize), examples_in(cpu_optimize)
        if config is None:
            return function(*args, **kwargs)
        check_examples(examples, config.accuracy)
        with forecasting(config):
            return call(
                lambda target: api.accelerate_for_cpu(target, config, examples=examples), args, kwargs
            )

    wrapper.__signature__ = _signature(function)  # type: ignore[attr-defined]
    return wrapper


def _patch_from_pretrained(owner: type, patches: HostPatches) -> None:
    """Add the keyword to the classmethod `owner.from_pretrained`.

    The outermost call removes the keyword, so that inner calls do not accelerate again. A `from_pretrained` of a subclass that
    passes `**kwargs` on reaches the wrapper of its base class.
    """
    function = vars(owner)["from_pretrained"].__func__

    def call(accelerate: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = without_strategy(kwargs)
        check_placement(device_map=kwargs.get("device_map"))
        loaded = _load(function, args, kwargs)
        if isinstance(loaded, tuple):  # output_loading_info=True
            return (accelerate(loaded[0]), *loaded[1:])
        return accelerate(loaded)

    patches.replace(owner, "from_pretrained", classmethod(with_keyword(function, patches, call)))


def _load(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `function(cls, name, ...)`. The name may be the path of a GGUF file, whose weights stay in blocks."""
    file = gguf.split_path(args[1]) if len(args) > 1 else None
    if file is not None and "gguf_file" not in kwargs:
        args, kwargs = (args[0], file[0], *args[2:]), {**kwargs, "gguf_file": file[1]}
    with _one_at_a_time, weights_as_stored():
        if kwargs.get("gguf_file") is not None:
            return gguf.load_in_blocks(function, *args, **kwargs)
        with mxfp4.experts_in_blocks():
            return function(*args, **kwargs)


def _patch_save_pretrained(owner: type, patches: HostPatches) -> None:
    """Add the keyword `packed` to `owner.save_pretrained`."""
    function = vars(owner)["save_pretrained"]

    @functools.wraps(function)
    def wrapper(self: Any, save_directory: Any, *args: Any, packed: bool | None = None, **kwargs: Any) -> Any:
        if not patches.active:
            extra = {} if packed is None else {"packed": packed}
            return function(self, save_directory, *args, **extra, **kwargs)
        return packed_saving.save(function, self, save_directory, packed, args, kwargs)

    patches.replace(owner, "save_pretrained", wrapper)


def patch_models(module: ModuleType, patches: HostPatches) -> None:
    """Patch transformers.modeling_utils: `PreTrainedModel` of all model classes, and the choice of quantizers."""
    _patch_from_pretrained(module.PreTrainedModel, patches)
    patch_loader(module.PreTrainedModel, patches)
    _patch_save_pretrained(module.PreTrainedModel, patches)
    patch_quantizer_choice(module, patches)


def patch_diffusers_models(module: ModuleType, patches: HostPatches) -> None:
    """Patch diffusers.models.modeling_utils: `ModelMixin` of all model classes."""
    _patch_from_pretrained(module.ModelMixin, patches)
    patch_loader(module.ModelMixin, patches)
    _patch_save_pretrained(module.ModelMixin, patches)


def patch_diffusers_pipelines(module: ModuleType, patches: HostPatches) -> None:
    """Patch diffusers.pipelines.pipeline_utils: `DiffusionPipeline`, to which the `AutoPipelineFor...` pass the keyword on."""
    _patch_from_pretrained(module.DiffusionPipeline, patches)
    function = module.DiffusionPipeline.save_pretrained

    @functools.wraps(function)
    def save_pretrained(self: Any, *args: Any, packed: bool | None = None, **kwargs: Any) -> Any:
        if packed and patches.active:
            packed_saving.check_accelerated(self)
        with packed_saving.pipeline_saving(packed if patches.active else None):
            return function(self, *args, **kwargs)

    patches.replace(module.DiffusionPipeline, "save_pretrained", save_pretrained)


def patch_auto_classes(module: ModuleType, patches: HostPatches) -> None:
    """Patch transformers.models.auto.modeling_auto: each auto class, because each has its own copy of `from_pretrained`."""
    classes = [module._BaseAutoModelClass]
    for owner in classes:  # the list grows by subclasses of subclasses
        classes.extend(cls for cls in owner.__subclasses__() if cls not in classes)
        if "from_pretrained" in vars(owner):
            _patch_from_pretrained(owner, patches)


def patch_pipeline_function(module: ModuleType, patches: HostPatches) -> None:
    """Patch transformers.pipelines: the function `pipeline`, and cached copies of it as `transformers.pipeline`."""
    function = module.pipeline
    signature = inspect.signature(function)

    def call(accelerate: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = signature.bind_partial(*args, **kwargs)
        arguments = bound.arguments = without_strategy(bound.arguments)
        if arguments.get("model_kwargs"):
            arguments["model_kwargs"] = without_strategy(arguments["model_kwargs"])
        device_map = arguments.get("device_map", (arguments.get("model_kwargs") or {}).get("device_map"))
        check_placement(arguments.get("device"), device_map)
        if arguments.get("device") is None and not _placed_by_map(arguments.get("model"), device_map):
            arguments["device"] = "cpu"  # the default would be the first accelerator of the machine
        with _one_at_a_time, mxfp4.experts_in_blocks(), weights_as_stored():
            pipe = function(*bound.args, **bound.kwargs)
        return accelerate(pipe)

    wrapper = with_keyword(function, patches, call)
    patches.replace(module, "pipeline", wrapper)
    patches.replace_cached("transformers", "pipeline", function, wrapper)


def patch_pipeline_classes(module: ModuleType, patches: HostPatches) -> None:
    """Patch transformers.pipelines.base: `Pipeline.__init__`.

    This covers classes that are called directly, and a `from transformers import pipeline` before `import hf_cpu_accel`. That
    function cannot be patched, but it passes unknown keywords to the class.
    """
    function = module.Pipeline.__init__
    signature = inspect.signature(function)

    def call(accelerate: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = signature.bind_partial(*args, **kwargs)
        arguments = bound.arguments
        check_placement(arguments.get("device"))
        if arguments.get("device") is None and not _placed_by_map(arguments.get("model"), None):
            arguments["device"] = "cpu"
        function(*bound.args, **bound.kwargs)
        accelerate(args[0])

    patches.replace(module.Pipeline, "__init__", with_keyword(function, patches, call))


def _placed_by_map(model: object, device_map: object) -> bool:
    """Return whether a device map places the model; transformers rejects a `device` in addition."""
    return device_map is not None or getattr(model, "hf_device_map", None) is not None


def patch_quantizers(module: ModuleType, patches: HostPatches) -> None:
    """Patch transformers.quantizers.auto: the tables for `quant_method` in config.json."""
    from hf_cpu_accel.frontends.packed_quantizer import METHOD, PackedConfig, PackedQuantizer

    patches.register(module.AUTO_QUANTIZER_MAPPING, METHOD, PackedQuantizer)
    patches.register(module.AUTO_QUANTIZATION_CONFIG_MAPPING, METHOD, PackedConfig)


def patch_diffusers_quantizers(module: ModuleType, patches: HostPatches) -> None:
    """Patch diffusers.quantizers.auto: the tables for `quant_method` in config.json."""
    from hf_cpu_accel.frontends.packed_diffusers import METHOD, PackedConfig, PackedQuantizer

    patches.register(module.AUTO_QUANTIZER_MAPPING, METHOD, PackedQuantizer)
    patches.register(module.AUTO_QUANTIZATION_CONFIG_MAPPING, METHOD, PackedConfig)


PATCHES: dict[str, Patch] = {
    "transformers.modeling_utils": patch_models,
    "transformers.models.auto.modeling_auto": patch_auto_classes,
    "transformers.quantizers.auto": patch_quantizers,
    "transformers.pipelines": patch_pipeline_function,
    "transformers.pipelines.base": patch_pipeline_classes,
    "diffusers.quantizers.auto": patch_diffusers_quantizers,
    "diffusers.models.modeling_utils": patch_diffusers_models,
    "diffusers.pipelines.pipeline_utils": patch_diffusers_pipelines,
}
