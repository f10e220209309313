"""The keyword `cpu_optimize=`: load and accelerate in one call.

    model = AutoModelForSequenceClassification.from_pretrained(path, cpu_optimize=True)
    pipe = transformers.pipeline("fill-mask", path, cpu_optimize="int8")

Accepted values (`cpu_config`): True (the defaults), a dtype name ("bfloat16"), a `CPUAccelConfig`, or its
dict, which may have `examples` beside `accuracy`; False and None leave the call exactly as it was. The value
is checked before anything is loaded; then the host loads as ever, and `accelerate_for_cpu` gets the finished
object.

`PATCHES` is the table that `frontends.import_hook` applies. A further host is a further line in it, once
`accelerate_for_cpu` takes that host's objects.
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

# While transformers loads, methods of its classes are others (`no_tie_weights`). Of two loads that end in the order in which they
# began, the second leaves them so.
_one_at_a_time = new_reentrant_lock()

_EXAMPLES = "examples"  # an argument of `accelerate_for_cpu`, and no setting

AcceleratedCall = Callable[[Callable[[Any], Any], tuple[Any, ...], dict[str, Any]], Any]
"""What runs in place of a wrapped function when the keyword is given: (accelerate, args, kwargs) -> its result, `accelerate` being
what the keyword asks for."""


def cpu_config(value: object) -> CPUAccelConfig | None:
    """The configuration that a value of `cpu_optimize=` means; None where nothing is to be accelerated.

    Args:
        value: None/False (nothing), True (the defaults), a dtype name, a `CPUAccelConfig` or its fields; those may have
            `examples` beside them, see `examples_in`.

    Raises:
        TypeError: any other type.
        ValueError: a dtype or field that `CPUAccelConfig` refuses.
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
    """The examples for `accuracy` that a dict has besides the fields of `CPUAccelConfig`, or None."""
    return value.get(_EXAMPLES) if isinstance(value, Mapping) else None


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of `function` with the new keyword before its `**kwargs`."""
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
    """`function` with the keyword: without it the plain function runs, with it `call(accelerate, args, kwargs)`."""

    @functools.wraps(function)
    def wrapper(*args: Any, cpu_optimize: Any = None, **kwargs: Any) -> Any:
        if not patches.active:
            # Uninstalled, but this wrapper was kept: like the original, which does not know the keyword.
            given = {} if cpu_optimize is None else {KEYWORD: cpu_optimize}
            return function(*args, **given, **kwargs)
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
    """Give the classmethod `owner.from_pretrained` the keyword.

    The outermost call takes the keyword and the calls inside do not see it, so nothing is accelerated twice.
    A subclass with a `from_pretrained` of its own that hands `**kwargs` on reaches the wrapper of its base
    class.
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
    """`function(cls, name, ...)`; the name may also be the path of a GGUF file, whose weights are kept as they are."""
    file = gguf.split_path(args[1]) if len(args) > 1 else None
    if file is not None and "gguf_file" not in kwargs:
        args, kwargs = (args[0], file[0], *args[2:]), {**kwargs, "gguf_file": file[1]}
    with _one_at_a_time, weights_as_stored():
        if kwargs.get("gguf_file") is not None:
            return gguf.load_in_blocks(function, *args, **kwargs)
        with mxfp4.experts_in_blocks():
            return function(*args, **kwargs)


def _patch_save_pretrained(owner: type, patches: HostPatches) -> None:
    """Give `owner.save_pretrained` the keyword `packed`."""
    function = vars(owner)["save_pretrained"]

    @functools.wraps(function)
    def wrapper(self: Any, save_directory: Any, *args: Any, packed: bool | None = None, **kwargs: Any) -> Any:
        if not patches.active:
            given = {} if packed is None else {"packed": packed}
            return function(self, save_directory, *args, **given, **kwargs)
        return packed_saving.save(function, self, save_directory, packed, args, kwargs)

    patches.replace(owner, "save_pretrained", wrapper)


def patch_models(module: ModuleType, patches: HostPatches) -> None:
    """transformers.modeling_utils: `PreTrainedModel.from_pretrained`, of all model classes, and who loads quantized weights."""
    _patch_from_pretrained(module.PreTrainedModel, patches)
    patch_loader(module.PreTrainedModel, patches)
    _patch_save_pretrained(module.PreTrainedModel, patches)
    patch_quantizer_choice(module, patches)


def patch_diffusers_models(module: ModuleType, patches: HostPatches) -> None:
    """diffusers.models.modeling_utils: `ModelMixin.from_pretrained`, which all model classes share."""
    _patch_from_pretrained(module.ModelMixin, patches)
    patch_loader(module.ModelMixin, patches)
    _patch_save_pretrained(module.ModelMixin, patches)


def patch_diffusers_pipelines(module: ModuleType, patches: HostPatches) -> None:
    """diffusers.pipelines.pipeline_utils: `DiffusionPipeline.from_pretrained`; the `AutoPipelineFor...` hand the keyword on."""
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
    """transformers.models.auto.modeling_auto: every auto class, as each has a copy of `from_pretrained` of
    its own."""
    classes = [module._BaseAutoModelClass]
    for owner in classes:  # grows while it runs: subclasses of subclasses
        classes.extend(cls for cls in owner.__subclasses__() if cls not in classes)
        if "from_pretrained" in vars(owner):
            _patch_from_pretrained(owner, patches)


def patch_pipeline_function(module: ModuleType, patches: HostPatches) -> None:
    """transformers.pipelines: the function `pipeline`, also where `transformers.pipeline` has it cached."""
    function = module.pipeline
    signature = inspect.signature(function)

    def call(accelerate: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = signature.bind_partial(*args, **kwargs)
        given = bound.arguments = without_strategy(bound.arguments)
        if given.get("model_kwargs"):
            given["model_kwargs"] = without_strategy(given["model_kwargs"])
        device_map = given.get("device_map", (given.get("model_kwargs") or {}).get("device_map"))
        check_placement(given.get("device"), device_map)
        if given.get("device") is None and not _placed_by_map(given.get("model"), device_map):
            given["device"] = "cpu"  # the default would be the first accelerator of the machine
        with _one_at_a_time, mxfp4.experts_in_blocks(), weights_as_stored():
            pipe = function(*bound.args, **bound.kwargs)
        return accelerate(pipe)

    wrapper = with_keyword(function, patches, call)
    patches.replace(module, "pipeline", wrapper)
    patches.replace_cached("transformers", "pipeline", function, wrapper)


def patch_pipeline_classes(module: ModuleType, patches: HostPatches) -> None:
    """transformers.pipelines.base: `Pipeline.__init__`.

    Serves the classes called directly, and a `from transformers import pipeline` that ran before
    `import hf_cpu_accel`: that function is out of reach, but it hands keywords it does not know to the class.
    """
    function = module.Pipeline.__init__
    signature = inspect.signature(function)

    def call(accelerate: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = signature.bind_partial(*args, **kwargs)
        given = bound.arguments
        check_placement(given.get("device"))
        if given.get("device") is None and not _placed_by_map(given.get("model"), None):
            given["device"] = "cpu"
        function(*bound.args, **bound.kwargs)
        accelerate(args[0])

    patches.replace(module.Pipeline, "__init__", with_keyword(function, patches, call))


def _placed_by_map(model: object, device_map: object) -> bool:
    """Whether a device map decides where the model is; a `device` on top of that is an error in
    transformers."""
    return device_map is not None or getattr(model, "hf_device_map", None) is not None


def patch_quantizers(module: ModuleType, patches: HostPatches) -> None:
    """transformers.quantizers.auto: the tables by which `quant_method` in a config.json is looked up."""
    from hf_cpu_accel.frontends.packed_quantizer import METHOD, PackedConfig, PackedQuantizer

    patches.register(module.AUTO_QUANTIZER_MAPPING, METHOD, PackedQuantizer)
    patches.register(module.AUTO_QUANTIZATION_CONFIG_MAPPING, METHOD, PackedConfig)


def patch_diffusers_quantizers(module: ModuleType, patches: HostPatches) -> None:
    """diffusers.quantizers.auto: the same of diffusers."""
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
