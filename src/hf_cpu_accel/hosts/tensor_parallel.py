"""How transformers divides a model among processes: which linears hold a part, and how the parts are joined.

`from_pretrained(..., distributed_config=DistributedConfig(tp_size=2))` makes a `DTensor` of each weight that its plan names, and
sets a forward on the module which hands the local part to the linear and joins what comes out.
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

# Of transformers' styles those whose modules take inputs that are whole, or split as the one before leaves them.
_JOINTS: dict[str, Joint] = {
    "colwise": "none",
    "rowwise": "sum",
    "colwise_gather_output": "concatenate",
    "colwise_rep": "concatenate",
}


@dataclass(frozen=True)
class Share:
    """What a process has of a linear.

    Attributes:
        joint: what makes the whole output of those of all processes; "none" where it stays divided among them.
        group: the processes; `size` of them.
    """

    joint: Joint
    group: ProcessGroup
    size: int


@dataclass(frozen=True)
class Division:
    """How a parameter is divided, without its values."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, parameter: Tensor) -> Division:
        divided: DTensor = parameter  # type: ignore[assignment]
        return cls(divided.device_mesh, divided.placements, divided.shape, divided.stride())

    def parameter(self, part: nn.Parameter) -> nn.Parameter:
        """The parameter of which this process has `part`."""
        from torch.distributed.tensor import DTensor

        divided = DTensor.from_local(
            part.detach(), self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        return nn.Parameter(divided, requires_grad=part.requires_grad)


def is_to_be_divided(config: Any) -> bool:
    """Whether the config of a model that is being loaded says that several processes will have a part of it each."""
    said = getattr(config, "distributed_config", None)
    return any((getattr(said, f"{kind}_size", None) or 1) > 1 for kind in ("tp", "dp", "pp"))


def is_divided(parameter: Tensor | None) -> bool:
    """Whether each process has a part of it, or a copy that is known to be one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(parameter, module.DTensor)


def part_of(parameter: nn.Parameter) -> nn.Parameter:
    """What this process has of a parameter that is divided, in the same memory."""
    divided: DTensor = parameter  # type: ignore[assignment]
    return nn.Parameter(divided.to_local().detach(), requires_grad=parameter.requires_grad)


def share_of(root: nn.Module, path: str, linear: nn.Module) -> Share | None:
    """What this process has of the linear at `path`; None if it is not divided, or in a way that stays transformers' own matter."""
    if not isinstance(linear, nn.Linear) or not is_divided(weight := linear._parameters.get("weight")):
        return None
    plan: dict[str, str] = getattr(root, "tp_plan", None) or {}
    joint = _JOINTS.get(plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path), ""))
    mesh: Any = weight.device_mesh  # type: ignore[union-attr]
    return None if joint is None or mesh.ndim != 1 else Share(joint, mesh.get_group(), mesh.size())
