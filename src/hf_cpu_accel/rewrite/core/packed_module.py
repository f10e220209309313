"""Base class of modules with a packed weight, which still show their weight to other code."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.lazy.lazy_weight import LazyWeight, read_only
from hf_cpu_accel.ops.derivatives import in_forward_mode, refuse_derivatives
from hf_cpu_accel.packing.linear import PackedWeight
from hf_cpu_accel.packing.saved_weight import SavedWeight
from hf_cpu_accel.patching.accelerated_module import CopiedParameter, SavedParameter, copies_of
from hf_cpu_accel.patching.replacement import Replacement

# The value of each module in the last state dict.
_saved: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Tensor]] = weakref.WeakKeyDictionary()


class PackedModule(Replacement):
    """A module with a packed weight.

    It has the bias parameter of the original module. The packed weight is neither parameter nor buffer, so
    `model.to(torch.bfloat16)` does not change it. `state_dict()` has the names and shapes of the original, with dequantized
    values.

    Attributes:
        bias: the Parameter of the original, or None.
        weight_dtype: dtype of the weight for other code; follows `model.to(dtype)`.
        is_exact: whether `unpack` returns exactly the values that were packed, if their dtype can hold them.
        rule: the name of the rule that created it.
        is_computed: whether the weight is computed from other tensors (weight norm), which the module has in place of a weight.
        _lost: rows of the weight that a folded norm multiplies by 0, or None.
    """

    prefix = "Packed"
    bias: nn.Parameter | None
    is_exact: bool = True
    rule: str = ""
    is_computed: bool = False
    is_of_linears: bool = False
    _lost: Tensor | None = None

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        assert isinstance(original.weight, Tensor)
        self.weight_dtype = original.weight.dtype
        self._values: dict[torch.dtype, Tensor] = {}
        self.register_parameter("bias", original._parameters["bias"])
        self.training = False

    @property
    @abstractmethod
    def weight_shape(self) -> tuple[int, ...]:
        """Return the shape of the original weight."""

    @property
    @abstractmethod
    def packed_dtype(self) -> str:
        """Return the dtype of the packed weight, one of `packing.DTYPES`."""

    @abstractmethod
    def unpack(self) -> Tensor:
        """Return the dequantized weight, in the shape and dtype of the original."""

    @property
    def weight(self) -> Tensor:
        """Return the original Parameter if it is kept (tied to another module, or `originals="memory"`), else read-only
        dequantized values."""
        kept = self._parameters.get("weight")
        if kept is not None:
            return kept
        return LazyWeight(self.weight_shape, self.weight_dtype, self.unpack, self._values)

    @weight.setter
    def weight(self, value: Tensor) -> None:
        raise read_only()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter as `nn.Module` does, also for assignments, but reject a weight.

        Raises:
            RuntimeError: `name` is the weight, or its name under `torch.nn.utils.prune`.
        """
        if name in ("weight", "weight_orig"):
            raise read_only()
        super().register_parameter(name, param)

    def whole_parameters(self) -> dict[str, Tensor | None]:
        """Return the parameters under their original names; a packed weight is a `LazyWeight`, which stores no values."""
        if self.is_computed or "weight" in self._parameters:
            return dict(self._parameters)
        weight = LazyWeight(self.weight_shape, self.weight_dtype, self.unpack, {})
        return {"weight": weight, **self._parameters}

    @property
    def copies_bias(self) -> bool:
        """Return whether a bias is derived from `bias`, which is read in place otherwise."""
        return False

    def copied_parameters(self) -> Iterator[CopiedParameter]:
        """Yield the original weight if it is kept, the sources of a computed weight, and a copied bias."""
        for name in self._parameters:
            if name != "bias" or self.copies_bias:
                yield CopiedParameter(self._parameters, name, is_packed=name != "bias")
        for module in self.modules():
            if module is not self:
                yield from copies_of(module, is_packed=True)

    def saved_parameters(self) -> Iterator[SavedParameter]:
        """Yield the weight, except a computed one: its sources are saved, and packed again."""
        if not self.is_computed:
            yield SavedParameter("weight", self._saved_weight, group=self)

    def _saved_weight(self, paths: tuple[str, ...]) -> SavedWeight:
        packed: Any = self.packed
        if not isinstance(packed, PackedWeight):  # in oneDNN's layout, which depends on the machine
            plain = packed.to_dense().contiguous()
            packed = PackedWeight(plain, None, plain[0].numel(), len(plain), self.packed_dtype)
        return SavedWeight(self.rule, paths, packed, self._lost)

    def parameter_place(self) -> tuple[nn.Module, str]:
        """Return the module and the name of the parameter whose values it holds; see `patching.restore.Packed`."""
        return self, "weight"

    def keep_original(self, weight: nn.Parameter) -> None:
        """Keep the original weight beside the packed one; `state_dict()` then has its exact values."""
        # In front of the bias, where the original has it: state_dict keys keep their order.
        self._parameters = {"weight": weight, **self._parameters}

    def keep_sources(self, original: nn.Module) -> None:
        """Keep the tensors from which `original` computes its weight, so that `state_dict()` has them."""
        self.is_computed = True
        self._parameters.update({**original._parameters, **self._parameters})
        self._modules.update(original._modules)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedModule:
        self.weight_dtype = changed_dtype(self.weight_dtype, fn)
        super()._apply(fn, recurse)
        self._values.clear()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if "weight" not in self._parameters and not self.is_computed:
            destination[prefix + "weight"] = self._saved_in(destination)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _saved_in(self, destination: dict[str, Any]) -> Tensor:
        """Return the weight for a state dict: one tensor even if the module is at several paths, so that savers store it once."""
        last = _saved.get(self)
        saved = None if last is None else last()
        if saved is None or not any(value is saved for value in destination.values()):
            saved = self.unpack()
            if saved.untyped_storage().nbytes() != saved.nbytes:
                saved = saved.clone()  # savers reject a part of a tensor with two names
            _saved[self] = weakref.ref(saved)
        return saved

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise loading_refused()


def around_packed(root: nn.Module) -> list[nn.Module]:
    """Return `root` and the modules in it that contain modules with packed weights."""
    found = {id(root): root}
    for path, module in root.named_modules():
        if hasattr(type(module), "whole_parameters"):
            names = path.split(".")
            around = (root.get_submodule(".".join(names[:length])) for length in range(1, len(names)))
            found.update((id(part), part) for part in around if not isinstance(part, PackedModule))
    return list(found.values())


def changed_dtype(dtype: torch.dtype, fn: Callable[[Tensor], Tensor]) -> torch.dtype:
    """Return the dtype that `fn`, from `model.to(...)`, gives to weights of `dtype`.

    Raises:
        RuntimeError: it moves them to another device, or casts them to what the kernels do not compute in.
    """
    like_weight = fn(torch.empty(0, dtype=dtype))
    if like_weight.device.type != "cpu":
        raise RuntimeError(
            f"an accelerated model cannot be moved to {like_weight.device.type!r}: call hf_cpu_accel.restore first"
        )
    if like_weight.dtype not in (torch.float32, torch.bfloat16):
        raise RuntimeError(
            f"an accelerated model cannot be cast to {like_weight.dtype}, only to float32 or bfloat16: "
            "call hf_cpu_accel.restore first"
        )
    return like_weight.dtype


def check_inference(module: nn.Module, input: Tensor) -> None:
    """Raise an error if `module` is used for more than inference, since its ops have no derivative.

    Raises:
        RuntimeError: `module` is in training mode, or a derivative with respect to `input` is computed.
    """
    if module.training:
        raise RuntimeError(
            "an accelerated model runs inference only: call model.eval(), or hf_cpu_accel.restore(model) to train it"
        )
    if (input.requires_grad or in_forward_mode()) and not isinstance(input, LazyTensor):
        refuse_derivatives("an accelerated layer", input)  # the inputs of a lazy tensor were checked


def loading_refused() -> RuntimeError:
    return RuntimeError(
        "cannot load a state_dict into an accelerated model: call hf_cpu_accel.restore(model), load, and accelerate again"
    )


def reads_weights(module: nn.Module) -> bool:
    """Return whether the module is an encoder layer of torch that reads the weights of its parts. With packed attention it calls
    them instead."""
    if not isinstance(module, nn.TransformerEncoderLayer):
        return False
    return not isinstance(getattr(module.self_attn, "in_proj_weight", None), LazyWeight)
