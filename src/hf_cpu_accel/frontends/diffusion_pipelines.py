"""Diffusion pipelines with names like those of optimum's other backends: load with diffusers, then accelerate.

    from hf_cpu_accel import CPUDiffusionPipeline

    pipe = CPUDiffusionPipeline.from_pretrained("stable-diffusion-v1-5/stable-diffusion-v1-5")
    pipe.save_pretrained("folder", packed=True)

The result is the pipeline of diffusers, accelerated in place. Its calls, `to`, schedulers, adapters, `save_pretrained` and
`push_to_hub` are those of diffusers. Importing this module imports diffusers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_cpu_accel import api
from hf_cpu_accel.config import CPUAccelConfig
from hf_cpu_accel.frontends.keyword import cpu_config, examples_in
from hf_cpu_accel.frontends.optimum_arguments import translate_arguments
from hf_cpu_accel.frontends.placement import check_placement, without_strategy
from hf_cpu_accel.frontends.tasks import DIFFUSION

try:
    import diffusers
except ImportError as error:
    raise ImportError(
        f"{', '.join(DIFFUSION)} need diffusers, which could not be imported ({error}); "
        "install it with: pip install hf_cpu_accel[diffusers]"
    ) from error


class CPUDiffusionPipeline:
    """A `diffusers.DiffusionPipeline` that is accelerated for the CPU, created by `from_pretrained` or `from_pipe`."""

    auto_pipeline_class: Any = diffusers.DiffusionPipeline

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        name = type(self).__name__
        raise TypeError(
            f"{name} cannot be called: use {name}.from_pretrained(...), or {name}.from_pipe(...) for a loaded pipeline"
        )

    @classmethod
    def from_pretrained(
        cls,
        model_id: Any,
        *,
        export: bool | None = None,
        cpu_optimize: bool | str | dict[str, Any] | CPUAccelConfig | None = None,
        **kwargs: Any,
    ) -> diffusers.DiffusionPipeline:
        """Load a pipeline, and accelerate each of its models.

        Args:
            model_id: name on the Hub or a folder, also a packed one.
            export: has no effect, because there is no other format.
            cpu_optimize: a bool, a dtype name, a `CPUAccelConfig`, or a dict of its fields. None for the settings of a packed
                folder, or else the default configuration. False for the plain pipeline.
            **kwargs: arguments of diffusers. Arguments of optimum's other backends are translated or rejected, see
                `optimum_arguments`.

        Returns:
            The pipeline of diffusers.

        Raises:
            TypeError, ValueError: an invalid `cpu_optimize`, or a `device_map` with other devices than the CPU; nothing is loaded.
        """
        kwargs, cpu_optimize = translate_arguments(kwargs, cpu_optimize)
        config = cpu_config(True if cpu_optimize is None else cpu_optimize)
        if config is not None:
            kwargs = without_strategy(kwargs)
            check_placement(device_map=kwargs.get("device_map"))
        pipe = cls.auto_pipeline_class.from_pretrained(model_id, **kwargs)
        return (
            pipe
            if config is None
            else api.accelerate_for_cpu(pipe, config, examples=examples_in(cpu_optimize))
        )

    @classmethod
    def from_pipe(
        cls,
        pipeline: diffusers.DiffusionPipeline,
        *,
        cpu_optimize: bool | str | dict[str, Any] | CPUAccelConfig | None = True,
        **kwargs: Any,
    ) -> diffusers.DiffusionPipeline:
        """Create a pipeline for this task from the models of another pipeline, which are accelerated in place.

        Args:
            pipeline: a loaded pipeline.
            cpu_optimize: a bool, a dtype name, a `CPUAccelConfig`, or a dict of its fields; False for the plain pipeline.
            **kwargs: arguments of `from_pipe` of diffusers.

        Returns:
            The pipeline of diffusers.

        Raises:
            TypeError, ValueError: an invalid `cpu_optimize`, or a pipeline without a counterpart for the task.
        """
        config = cpu_config(cpu_optimize)
        pipe = cls.auto_pipeline_class.from_pipe(pipeline, **kwargs)
        return (
            pipe
            if config is None
            else api.accelerate_for_cpu(pipe, config, examples=examples_in(cpu_optimize))
        )


def _make_class(name: str, loader: str) -> type[CPUDiffusionPipeline]:
    doc = f"A pipeline of `diffusers.{loader}` that is accelerated for the CPU. See `CPUDiffusionPipeline`."
    attributes = {
        "__doc__": doc,
        "__module__": __name__,
        "auto_pipeline_class": getattr(diffusers, loader),
    }
    return type(name, (CPUDiffusionPipeline,), attributes)


for _name, _loader in DIFFUSION.items():
    if _name != CPUDiffusionPipeline.__name__:
        globals()[_name] = _make_class(_name, _loader)

__all__ = [*DIFFUSION]

if TYPE_CHECKING:

    def __getattr__(name: str) -> type[CPUDiffusionPipeline]: ...
