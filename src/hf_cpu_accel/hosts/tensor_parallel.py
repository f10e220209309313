"""Tensor parallelism of transformers: the linears that are divided among processes, and how their outputs are joined.

`from_pretrained(..., distributed_config=DistributedConfig(tp_size=2))` converts each weight in its plan to a `DTensor`, and sets a
forward on the module that calls the linear with the local part and joins the outputs.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup
    from torch.distributed.tensor import DTensor

Joint = Literal["none", "sum", "concatenate"]

# The styles of transformers whose inputs are full, or split like the outputs of the linear before.
_JOINTS: dict[str, Joint] = {
    "colwise": "none",
    "rowwise": "sum",
    "colwise_gather_output": "concatenate",
    "colwise_rep": "concatenate",
}


@dataclass(frozen=True)
class Share:
    """The part of a linear in this process.

    Attributes:
        joint: how the outputs of all processes are joined; "none" if they stay divided.
        group: the processes.
        size: the number of processes.
    """

    joint: Joint
    group: ProcessGroup
    size: int


@dataclass(frozen=True)
class Division:
    """The division of a parameter, without its values."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, parameter: Tensor) -> Division:
        divided: DTensor = parameter  # type: ignore[assignment]
        return cls(divided.device_mesh, divided.placements, divided.shape, divided.stride())

    def parameter(self, part: nn.Parameter) -> nn.Parameter:
        """Return the divided parameter with the local part `part`."""
        from torch.distributed.tensor import DTensor

        divided = DTensor.from_local(
            part.detach(), self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        return nn.Parameter(divided, requires_grad=part.requires_grad)


def is_to_be_divided(config: Any) -> bool:
    """Return whether the config of a model divides it among several processes."""
    distributed = getattr(config, "distributed_config", None)
    return any((getattr(distributed, f"{kind}_size", None) or 1) > 1 for kind in ("tp", "dp", "pp"))


def is_divided(parameter: Tensor | None) -> bool:
    """Return whether the parameter is a `DTensor`: divided among processes, or replicated."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(parameter, module.DTensor)


def part_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return the local part of a divided parameter, in the same memory."""
    divided: DTensor = parameter  # type: ignore[assignment]
    return nn.Parameter(divided.to_local().detach(), requires_grad=parameter.requires_grad)


def share_of(root: nn.Module, path: str, linear: nn.Module) -> Share | None:
    """Return the share of this process of the linear at `path`; None if it is not divided, or in an unsupported style."""
    if not isinstance(linear, nn.Linear) or not is_divided(weight := linear._parameters.get("weight")):
        return None
    plan: dict[str, str] = getattr(root, "tp_plan", None) or {}
    joint = _JOINTS.get(plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path), ""))
    mesh: Any = weight.device_mesh  # type: ignore[union-attr]
    return None if joint is None or mesh.ndim != 1 else Share(joint, mesh.get_group(), mesh.size())
