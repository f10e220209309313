"""What one replica of the deployment in serving.py is: models and the server around them. Nothing here needs Ray."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hf_cpu_accel.serve.http.app import Service
from hf_cpu_accel.serve.http.metrics import Metrics
from hf_cpu_accel.serve.loading import Settings, load
from hf_cpu_accel.serve.models import Models


class Arguments(BaseModel):
    """The `args` of an application in serve.yaml.

    Attributes:
        models: ids or folders, `NAME=MODEL` for clients to call it NAME. Packed folders are mapped, so replicas share them.
        cpus: of each replica: what it takes of the cluster, and its threads.
        min_replicas, max_replicas: how many there may be; of 0 the next request waits until one is loaded.
        target_requests: that each replica has at a time on average; more start another one.
        dtype: as `accelerate_for_cpu` takes it, for models that are not packed.
        rows: chats that a replica computes at a time.
    """

    model_config = ConfigDict(extra="forbid")

    models: list[str] = Field(min_length=1)
    cpus: int = Field(1, ge=1)
    min_replicas: int = Field(1, ge=0)
    max_replicas: int = Field(2, ge=1)
    target_requests: float = Field(8, gt=0)
    dtype: str = "auto"
    rows: int = Field(8, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Arguments:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas={self.min_replicas} is more than max_replicas={self.max_replicas}"
            )
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Those of `ray.serve.deployment`."""
        return {
            "ray_actor_options": {"num_cpus": self.cpus},
            "autoscaling_config": {
                "min_replicas": self.min_replicas,
                "max_replicas": self.max_replicas,
                "target_ongoing_requests": self.target_requests,
            },
            # The rest waits in Ray's queue, where the next replica that is free takes it.
            "max_ongoing_requests": max(1, round(2 * self.target_requests)),
        }


def service(arguments: Arguments) -> Service:
    """The models, loaded, and their endpoints.

    Raises:
        OSError, ValueError: see `hf_cpu_accel.serve.loading.load`.
    """
    metrics = Metrics()
    settings = Settings(
        {"dtype": arguments.dtype, "threads": arguments.cpus}, engine={"rows": arguments.rows}
    )
    return Service(Models([load(model, metrics, settings) for model in arguments.models]), metrics)
