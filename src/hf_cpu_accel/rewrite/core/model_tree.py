"""The modules of a model before its rewrite, and the weights in them."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from hf_cpu_accel.hosts.peft import kept_for_adapters
from hf_cpu_accel.patching.weight_owners import address_of, weight_owners
from hf_cpu_accel.rewrite.core.layer_stacks import in_plain_lists

_LISTED = "a plain Python list also holds it, where it cannot be replaced"


class ModelTree:
    """The modules of a model before its rewrite.

    Args:
        root: the model.
        name: its name in a target with several models.

    Attributes:
        modules: (path, module) of the modules for the rules.
        slots: the places of each module by its id, as (parent, name): several for a module used twice; none for the root, and for a
            module that a plain list holds, too (as in Mask2Former): a loop over the list would not see a replacement.
        obstacles: reasons why modules are not replaced, by id: those in plain lists, and those that adapters read without a call of
            the model.
        handled: ids of the modules that no further rule gets: a rule has handled them, or TorchScript ignores replacements.
    """

    def __init__(self, root: nn.Module, name: str) -> None:
        self.modules = list(root.named_modules())
        self.slots: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
        listed = in_plain_lists(root)
        self.obstacles = {**kept_for_adapters(root, name), **dict.fromkeys(listed, _LISTED)}
        self.handled = {
            id(module) for _, module in self.modules if isinstance(module, torch.jit.ScriptModule)
        }
        without = listed | self.handled
        for parent in root.modules():
            for child_name, child in parent._modules.items():
                if child is not None and id(child) not in without:
                    self.slots[id(child)].append((parent, child_name))


class Weights:
    """The weights of a model during its rewrite.

    Attributes:
        owners: the paths of the parameters, by storage: several where weights are tied.
        created: ids of weights that a stage created.
        computed: (plain module that rules are offered, module that computes its weight), by the ids of the first.
        freed: bytes of weights that were released since the heap was last trimmed.
    """

    def __init__(self, root: nn.Module) -> None:
        self.owners = weight_owners(root)
        self.created: set[int] = set()
        self.computed: dict[int, tuple[nn.Module, nn.Module]] = {}
        self.freed = 0

    def other_owner(self, parameter: Tensor, path: str) -> str | None:
        """Return the path of another parameter that shares memory with `parameter` at `path`, or None."""
        return next((owner for owner in self.owners[address_of(parameter)] if owner != path), None)

    def is_tied(self, weight: Tensor) -> bool:
        return len(self.owners[address_of(weight)]) > 1
