"""`save_pretrained` of accelerated models: `packed=True` writes the packed weights, without it the original ones are written."""

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
from hf_cpu_accel.rewrite.apply import belongs_to_accelerated
from hf_cpu_accel.rewrite.core.float16 import cast_as_outside
from hf_cpu_accel.rewrite.linear.tensor_parallel import is_joined
from hf_cpu_accel.rewrite.saved import original_state, plain_tensors, saved_weights
from hf_cpu_accel.runtime.context import within

# Of a plain save, and nothing to a file of packed weights.
FILE_OF_DIFFUSERS = "diffusion_pytorch_model.safetensors"
_of_pipeline: ContextVar[bool | None] = ContextVar("packed, for the models of a pipeline", default=None)
_WITHOUT_MEANING = ("max_shard_size", "safe_serialization", "push_to_hub", "is_main_process", "token")


def save(
    plainly: Callable[..., Any],
    model: Any,
    folder: str | Path,
    packed: bool | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """`model.save_pretrained(folder, *args, packed=packed, **kwargs)`; `plainly` is the host's own method.

    With `packed=None`, what was loaded packed is written packed.

    Raises:
        TypeError: `packed` is no bool, or an option does not go with it.
        ValueError: the model is not accelerated, or is to be pushed besides.
    """
    asked = packed
    if packed is None:
        packed = _of_pipeline.get() if acceleration_of(model) is not None else None
    if packed is not None and not isinstance(packed, bool):
        raise TypeError(
            f"packed={packed!r}: expected True, False, or None for what the model was loaded from"
        )
    acceleration = acceleration_of(model)
    if is_joined(model):
        raise ValueError(
            f"this {type(model).__name__} is accelerated, and each process has a part of it: call hf_cpu_accel.restore in all of "
            "them and save then, or save the model in one process before it is divided"
        )
    came_packed = acceleration is not None and acceleration.from_file
    if packed or (packed is None and came_packed):
        other = [name for name in kwargs if name not in _WITHOUT_MEANING]
        if asked and (args or other):
            raise TypeError(
                f"packed=True takes no {other[0] if other else repr(args[0])}: it writes one file of all weights"
            )
        if kwargs.get("push_to_hub"):
            raise ValueError(
                "packed=True, push_to_hub=True: save the folder, then huggingface_hub.upload_folder it"
            )
        save_packed(model, folder)
        return
    if acceleration is None and belongs_to_accelerated(model):
        warnings.warn(
            f"this {type(model).__name__} is a part of an accelerated model: save_pretrained writes its weights as they were "
            "rounded. Call hf_cpu_accel.restore on the whole before, or accelerate this part by itself",
            UserWarning,
            stacklevel=3,
        )
    with ExitStack() as around:
        if acceleration is not None and kwargs.get("state_dict") is None and not args:
            around.enter_context(with_originals(model, acceleration))
        elif acceleration is None and any(isinstance(p, Mxfp4Stack) for p in model.parameters()):
            around.enter_context(_with_numbers(model))
        around.enter_context(_as_a_checkpoint(model))
        plainly(model, folder, *args, **kwargs)


def check_accelerated(target: Any) -> None:
    """Refuse `packed=True` of a pipeline or an encoder of which no model is accelerated.

    Raises:
        ValueError: that.
    """
    if not any(is_model(root.module) and acceleration_of(root.module) is not None for root in find(target)):
        raise ValueError(
            f"packed=True: no model of this {type(target).__name__} is accelerated: call hf_cpu_accel.accelerate_for_cpu first"
        )


def pipeline_saving(packed: bool | None) -> AbstractContextManager[None]:
    """Inside, the accelerated models of a pipeline or an encoder are saved packed, or not, or as they were loaded (None)."""
    return within(_of_pipeline, packed)


@contextmanager
def with_originals(model: Any, acceleration: Acceleration) -> Iterator[None]:
    """Inside, the state dict of `model` has the original weights, or there is a warning that it has not."""
    try:
        state = original_state(model, acceleration.journal)
    except RuntimeError as error:
        warnings.warn(
            f"save_pretrained writes weights that were rounded to {acceleration.plan.dtype}: {error}. "
            "packed=True writes what is there, as it is",
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
def _with_numbers(model: Any) -> Iterator[None]:
    """Inside, the state dict of `model` has the numbers of experts that were loaded for us and are not packed any more."""
    state = model.state_dict()
    numbers = {name: t.numbers() if isinstance(t, Mxfp4Stack) else t for name, t in state.items()}
    vars(model)["state_dict"] = lambda: numbers
    try:
        yield
    finally:
        vars(model).pop("state_dict", None)


@contextmanager
def _as_a_checkpoint(model: Any) -> Iterator[None]:
    """Inside, nothing of `model` says that it came from a packed folder."""
    quantizer, config = _quantizer_of(model), vars(model.config) if hasattr(model, "config") else {}
    said = config.get("quantization_config")
    if quantizer is None:
        yield
        return
    try:
        del model.hf_quantizer
        config.pop("quantization_config", None)
        yield
    finally:
        model.hf_quantizer = quantizer
        config["quantization_config"] = said


def _quantizer_of(model: Any) -> Any:
    """The quantizer of ours that loaded the model, or None."""
    quantizer = vars(model).get("hf_quantizer")
    return quantizer if getattr(quantizer, "reads_packed_folders", False) else None


def save_packed(model: Any, folder: str | Path) -> int:
    """Write an accelerated model of transformers or diffusers: config files and one file of weights.

    Returns:
        The bytes of the file.

    Raises:
        ValueError: the model is not accelerated as a whole, is calibrated for static ranges, or has adapters.
        OSError: the folder cannot be written.
    """
    acceleration = acceleration_of(model)
    if acceleration is None or not acceleration.is_whole or acceleration.plan.dtype == "none":
        raise ValueError(
            f"packed=True: this {type(model).__name__} is not accelerated, or only as a part of another model: call "
            "hf_cpu_accel.accelerate_for_cpu on it first"
        )
    if acceleration.config.dtype == "int8-static":
        raise ValueError(
            "packed=True: packed files have no ranges of images, which dtype='int8-static' was calibrated for: save the model in "
            "'int8', or calibrate it in each process"
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError("packed=True: the model has adapters of peft: merge them into its weights first")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = saved_weights(model)
    packed = {path for weight in weights for path in weight.parameters}
    plain = plain_tensors(model, packed, getattr(model, "all_tied_weights_keys", {}))
    cast_as_outside(plain, acceleration.journal)
    plan = acceleration.plan
    # What is this machine's own is decided anew where the model is loaded.
    settings = dataclasses.replace(
        acceleration.config,
        dtype=plan.dtype,
        dtypes=_dtypes_of(acceleration),
        accuracy=None,
        threads=None,
        skip_modules=_skipped(model, acceleration),
        compiled_bundle=None,
        trust_compiled=False,
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
    said = {
        "quant_method": "cpu_accel",
        "format_version": FORMAT_VERSION,
        "dtype": plan.dtype,
        "library_version": _library_version(),
    }
    (_write_config_of_diffusers if of_diffusers else _write_configs)(model, folder, said)
    settings.save(folder)
    return written


def _skipped(model: Any, acceleration: Acceleration) -> tuple[str, ...]:
    """`skip_modules` for the model alone, which is loaded without the name that a pipeline or an encoder gave it."""
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
    """Those that were asked for, which decide, and those that were chosen, for the model by itself."""
    name = f"{acceleration.name}." if acceleration.name else ""
    asked = {pattern.removeprefix(name): dtype for pattern, dtype in dict(acceleration.config.dtypes).items()}
    return (*acceleration.plan.chosen_dtypes, *asked.items())


def _write_config_of_diffusers(model: Any, folder: Path, said: dict[str, Any]) -> None:
    model.save_config(folder)
    path = folder / "config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), "quantization_config": said}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_configs(model: Any, folder: Path, said: dict[str, Any]) -> None:
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.quantization_config = said
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _library_version() -> str:
    try:
        return version("hf_cpu_accel")
    except PackageNotFoundError:
        return "from source"
