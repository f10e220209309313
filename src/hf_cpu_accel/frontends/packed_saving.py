"""`save_pretrained` of accelerated models: it writes the original weights, or with `packed=True` the packed ones."""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hf_cpu_accel.checkpoints.mxfp4 import Mxfp4Stack
from hf_cpu_accel.frontends.packed_loading import plan_rows
from hf_cpu_accel.hosts.find import find
from hf_cpu_accel.hosts.models import is_model
from hf_cpu_accel.packing.packed_file import FILE_NAME, FORMAT_VERSION, write_packed
from hf_cpu_accel.patching.acceleration import Acceleration, acceleration_of
from hf_cpu_accel.plan import Plan
from hf_cpu_accel.rewrite.core.checks import belongs_to_accelerated
from hf_cpu_accel.rewrite.core.float16 import cast_as_outside
from hf_cpu_accel.rewrite.linear.tensor_parallel import is_joined
from hf_cpu_accel.rewrite.saved import original_state, plain_tensors, saved_weights
from hf_cpu_accel.runtime.context import within

FILE_OF_DIFFUSERS = "diffusion_pytorch_model.safetensors"
_of_pipeline: ContextVar[bool | None] = ContextVar("packed, for the models of a pipeline", default=None)
# Options of a plain `save_pretrained` without an effect on a packed file.
_IGNORED = ("max_shard_size", "safe_serialization", "push_to_hub", "is_main_process", "token")


def save(
    original: Callable[..., Any],
    model: Any,
    folder: str | Path,
    packed: bool | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Save a model like `model.save_pretrained(folder, *args, packed=packed, **kwargs)`.

    Args:
        original: `save_pretrained` of the host.
        model: the model.
        folder: folder to write.
        packed: True for the packed weights, False for the original ones, None for the format that the model was loaded from.
        args: further positional arguments of `original`.
        kwargs: keyword arguments of `original`.

    Raises:
        TypeError: `packed` is not a bool, or an option is not supported with it.
        ValueError: the model is not accelerated, or `packed=True` with `push_to_hub=True`.
    """
    packed_argument = packed
    if packed is None:
        packed = _of_pipeline.get() if acceleration_of(model) is not None else None
    if packed is not None and not isinstance(packed, bool):
        raise TypeError(
            f"packed={packed!r}: expected True, False, or None for the format that the model was loaded from"
        )
    acceleration = acceleration_of(model)
    if is_joined(model):
        raise ValueError(
            f"this accelerated {type(model).__name__} is divided among processes and cannot be saved: call hf_cpu_accel.restore in "
            "all of them first, or save the model in one process before it is divided"
        )
    from_packed = acceleration is not None and acceleration.from_file
    if packed or (packed is None and from_packed):
        unsupported = [name for name in kwargs if name not in _IGNORED]
        if packed_argument and (args or unsupported):
            raise TypeError(
                f"packed=True does not support {unsupported[0] if unsupported else repr(args[0])}, because it writes one file with "
                "all weights; leave it out"
            )
        if kwargs.get("push_to_hub"):
            raise ValueError(
                "packed=True is not supported with push_to_hub=True: save the folder, then call huggingface_hub.upload_folder"
            )
        save_packed(model, folder)
        return
    if acceleration is None and belongs_to_accelerated(model):
        warnings.warn(
            f"this {type(model).__name__} is a part of an accelerated model, so save_pretrained writes rounded weights. Call "
            "hf_cpu_accel.restore on the whole model first, or accelerate only this part",
            UserWarning,
            stacklevel=3,
        )
    with ExitStack() as around:
        if acceleration is not None and kwargs.get("state_dict") is None and not args:
            around.enter_context(with_originals(model, acceleration))
        elif acceleration is None and any(isinstance(p, Mxfp4Stack) for p in model.parameters()):
            around.enter_context(_with_dequantized_experts(model))
        around.enter_context(_without_packed_config(model))
        original(model, folder, *args, **kwargs)


def check_accelerated(target: Any) -> None:
    """Check `packed=True` for a pipeline or an encoder.

    Raises:
        ValueError: no model of it is accelerated.
    """
    if not any(is_model(root.module) and acceleration_of(root.module) is not None for root in find(target)):
        raise ValueError(
            f"packed=True, but no model of this {type(target).__name__} is accelerated: call hf_cpu_accel.accelerate_for_cpu first"
        )


def pipeline_saving(packed: bool | None) -> AbstractContextManager[None]:
    """Set the default of `packed` for the accelerated models of a pipeline or an encoder inside the context."""
    return within(_of_pipeline, packed)


@contextmanager
def with_originals(model: Any, acceleration: Acceleration) -> Iterator[None]:
    """Make the state dict of `model` return the original weights inside the context, or warn that they are not available."""
    try:
        state = original_state(model, acceleration.journal)
    except RuntimeError as error:
        warnings.warn(
            f"save_pretrained writes weights that are rounded to {acceleration.plan.dtype}: {error}. "
            "Pass packed=True to write the packed weights",
            UserWarning,
            stacklevel=7,
        )
        yield
        return
    vars(model)["state_dict"] = lambda: state
    try:
        yield
    finally:
        vars(model).pop("state_dict", None)


@contextmanager
def _with_dequantized_experts(model: Any) -> Iterator[None]:
    """Make the state dict of a restored model return dequantized MXFP4 experts inside the context."""
    state = model.state_dict()
    dequantized = {name: t.numbers() if isinstance(t, Mxfp4Stack) else t for name, t in state.items()}
    vars(model)["state_dict"] = lambda: dequantized
    try:
        yield
    finally:
        vars(model).pop("state_dict", None)


@contextmanager
def _without_packed_config(model: Any) -> Iterator[None]:
    """Hide inside the context that `model` was loaded from a packed folder."""
    quantizer, config = _quantizer_of(model), vars(model.config) if hasattr(model, "config") else {}
    quantization_config = config.get("quantization_config")
    if quantizer is None:
        yield
        return
    try:
        del model.hf_quantizer
        config.pop("quantization_config", None)
        yield
    finally:
        model.hf_quantizer = quantizer
        config["quantization_config"] = quantization_config


def _quantizer_of(model: Any) -> Any:
    """Return the quantizer for packed folders that loaded the model, or None."""
    quantizer = vars(model).get("hf_quantizer")
    return quantizer if getattr(quantizer, "reads_packed_folders", False) else None


def save_packed(model: Any, folder: str | Path) -> int:
    """Write an accelerated model of transformers or diffusers: config files and one file with the packed weights.

    Args:
        model: the model.
        folder: folder to write, created if needed.

    Returns:
        The size of the file in bytes.

    Raises:
        ValueError: the model is not accelerated as a whole, has calibrated ranges (`"int8-static"`), or has adapters.
        OSError: the folder cannot be written.
    """
    acceleration = acceleration_of(model)
    if acceleration is None or not acceleration.is_whole or acceleration.plan.dtype == "none":
        raise ValueError(
            f"packed=True, but this {type(model).__name__} is not accelerated, or only as a part of another model: call "
            "hf_cpu_accel.accelerate_for_cpu on it first"
        )
    if acceleration.config.dtype == "int8-static":
        raise ValueError(
            "packed=True is not supported with dtype='int8-static', because packed files contain no calibrated ranges: save the "
            "model in 'int8', or calibrate it in each process"
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError("packed=True is not supported with peft adapters: merge them into the weights first")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = saved_weights(model)
    packed = {path for weight in weights for path in weight.parameters}
    plain = plain_tensors(model, packed, getattr(model, "all_tied_weights_keys", {}))
    cast_as_outside(plain, acceleration.journal)
    plan = acceleration.plan
    # Settings that depend on the machine are chosen again when the model is loaded.
    settings = dataclasses.replace(
        acceleration.config,
        dtype=plan.dtype,
        dtypes=_dtypes_of(acceleration),
        accuracy=None,
        threads=None,
        skip_modules=_skip_modules_of(model, acceleration),
    )
    about = {
        "library_version": _library_version(),
        "model": type(model).__name__,
        "config": settings.to_dict(),
        "plan": sorted(plan_rows(model)),
        "choices": _saved_choices(plan),
    }
    of_diffusers = hasattr(model, "save_config")
    written = write_packed(folder / (FILE_OF_DIFFUSERS if of_diffusers else FILE_NAME), weights, plain, about)
    for name in ("model.safetensors", "model.safetensors.index.json", f"{FILE_OF_DIFFUSERS}.index.json"):
        (folder / name).unlink(missing_ok=True)
    quantization_config = {
        "quant_method": "cpu_accel",
        "format_version": FORMAT_VERSION,
        "dtype": plan.dtype,
        "library_version": _library_version(),
    }
    (_write_config_of_diffusers if of_diffusers else _write_configs)(model, folder, quantization_config)
    settings.save(folder)
    return written


def _skip_modules_of(model: Any, acceleration: Acceleration) -> tuple[str, ...]:
    """Return `skip_modules` for the model alone, without its name in a pipeline or an encoder."""
    patterns, name = acceleration.config.skip_modules, acceleration.name
    if not name:
        return patterns
    paths = [path for path, _ in model.named_modules() if path]
    return tuple(
        path for path in paths if any(fnmatchcase(f"{name}.{path}", pattern) for pattern in patterns)
    )


def _saved_choices(plan: Plan) -> list[dict[str, Any]]:
    return [dataclasses.asdict(choice) for choice in plan.choices]


def _dtypes_of(acceleration: Acceleration) -> tuple[tuple[str, str], ...]:
    """Return the chosen dtypes and the requested ones, which have precedence, without the name of the model in a target."""
    name = f"{acceleration.name}." if acceleration.name else ""
    requested = {
        pattern.removeprefix(name): dtype for pattern, dtype in dict(acceleration.config.dtypes).items()
    }
    return (*acceleration.plan.chosen_dtypes, *requested.items())


def _write_config_of_diffusers(model: Any, folder: Path, quantization_config: dict[str, Any]) -> None:
    model.save_config(folder)
    path = folder / "config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), "quantization_config": quantization_config}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_configs(model: Any, folder: Path, quantization_config: dict[str, Any]) -> None:
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.quantization_config = quantization_config
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _library_version() -> str:
    try:
        return version("hf_cpu_accel")
    except PackageNotFoundError:
        return "from source"
