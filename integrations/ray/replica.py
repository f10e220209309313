"""A replica of the deployment in serving.py: the models and their server. This module does not need Ray."""

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
        models: model ids or folders; with `NAME=MODEL`, clients use NAME. Packed folders are mapped, so that replicas share them.
        cpus: CPUs and threads per replica.
        min_replicas: minimum number of replicas; with 0, the next request waits until a replica is loaded.
        max_replicas: maximum number of replicas.
        target_requests: average number of concurrent requests per replica, above which Ray starts another replica.
        dtype: dtype for `accelerate_for_cpu`, for models that are not packed.
        rows: number of chats that a replica generates at the same time.
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
                f"min_replicas={self.min_replicas} is more than max_replicas={self.max_replicas}; expected at most that"
            )
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Return the options for `ray.serve.deployment`."""
        return {
            "ray_actor_options": {"num_cpus": self.cpus},
            "autoscaling_config": {
                "min_replicas": self.min_replicas,
                "max_replicas": self.max_replicas,
                "target_ongoing_requests": self.target_requests,
            },
            # Further requests wait in Ray's queue for a free replica.
            "max_ongoing_requests": max(1, round(2 * self.target_requests)),
        }


def service(arguments: Arguments) -> Service:
    """Load the models and return their service.

    Raises:
        OSError, ValueError: from `hf_cpu_accel.serve.loading.load`.
    """
    metrics = Metrics()
    settings = Settings(
        {"dtype": arguments.dtype, "threads": arguments.cpus}, engine={"rows": arguments.rows}
    )
    return Service(Models([load(model, metrics, settings) for model in arguments.models]), metrics)
