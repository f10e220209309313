"""Diffusion pipelines by the names of optimum's other back ends: load with diffusers, then accelerate.

    from hf_cpu_accel import CPUDiffusionPipeline

    pipe = CPUDiffusionPipeline.from_pretrained("stable-diffusion-v1-5/stable-diffusion-v1-5")
    pipe.save_pretrained("folder", packed=True)

What comes back is diffusers' own pipeline, accelerated in place: calls, `to`, schedulers, adapters, `save_pretrained` and
`push_to_hub` are its own. Importing this module imports diffusers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_cpu_accel import api
from hf_cpu_accel.config import CPUAccelConfig
from hf_cpu_accel.frontends.keyword import cpu_config, examples_in
from hf_cpu_accel.frontends.optimum_arguments import in_our_words
from hf_cpu_accel.frontends.placement import check_placement, without_strategy
from hf_cpu_accel.frontends.tasks import DIFFUSION

try:
    import diffusers
except ImportError as error:
    raise ImportError(
        f"{', '.join(DIFFUSION)} build on diffusers, which could not be imported ({error}); "
        "install it with: pip install hf_cpu_accel[diffusers]"
    ) from error


class CPUDiffusionPipeline:
    """`diffusers.DiffusionPipeline`, accelerated for the CPU; made by `from_pretrained` or `from_pipe`."""

    auto_pipeline_class: Any = diffusers.DiffusionPipeline

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        name = type(self).__name__
        raise TypeError(
            f"{name} is made by {name}.from_pretrained(...), or of a pipeline that is loaded by {name}.from_pipe(...)"
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
            model_id: a name on the hub or a folder, of a packed pipeline, too.
            export: has no effect, as there is no other format to export to.
            cpu_optimize: bool, dtype name, `CPUAccelConfig`, or dict of its fields. By default what a packed folder says, and
                else the default configuration; False: the plain pipeline.
            **kwargs: as in diffusers. Arguments of optimum's other back ends are understood or refused, as `optimum_arguments`
                says.

        Raises:
            TypeError, ValueError: a bad `cpu_optimize`, or a `device_map` off the CPU; nothing is loaded.
        """
        kwargs, cpu_optimize = in_our_words(kwargs, cpu_optimize)
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
        """`from_pipe` of diffusers: a pipeline for this task of the models of another one, which are accelerated in place.

        Raises:
            TypeError, ValueError: a bad `cpu_optimize`, or a pipeline that has no counterpart for the task.
        """
        config = cpu_config(cpu_optimize)
        pipe = cls.auto_pipeline_class.from_pipe(pipeline, **kwargs)
        return (
            pipe
            if config is None
            else api.accelerate_for_cpu(pipe, config, examples=examples_in(cpu_optimize))
        )


def _make_class(name: str, loader: str) -> type[CPUDiffusionPipeline]:
    doc = f"`diffusers.{loader}`, accelerated for the CPU. See `CPUDiffusionPipeline`."
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
