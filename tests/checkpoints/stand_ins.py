"""Classes with what the readers in `checkpoints/` look at, under the names that the hosts give them, and numbers chosen at random.

The packages themselves are large or change what transformers does; `tests/checkpoints/formats.py` has the same with them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NF4 = (
    *(-1.0, -0.69619280, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.07958030, 0.16093020, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0),
)
FP4 = (
    *(0.0, 0.00520833, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25),
    *(0.0, -0.00520833, -2 / 3, -1.0, -1 / 3, -0.5, -1 / 6, -0.25),
)


def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.randint(low, high, shape, dtype=dtype)


def pairs_of(q: Tensor, *, first_is_high: bool) -> Tensor:
    """Neighbors of 4 bits in one byte."""
    first, second = q.reshape(-1, 2).unbind(1)
    return first << 4 | second if first_is_high else second << 4 | first


class Multiplies(nn.Linear):
    """A host's linear: it multiplies by `true`, and counts how often."""

    true: Tensor
    calls = 0

    def __init__(self, true: Tensor, weight: nn.Parameter, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = true.shape
        self.true, self.weight = true, weight
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return F.linear(input, self.true.to(input.dtype), self.bias)


class Linear4bit(Multiplies):
    @classmethod
    def random(
        cls, out_features: int, in_features: int, bias: Tensor | None, kind: str, *, nested: bool
    ) -> Linear4bit:
        count = out_features * in_features // 64
        levels = torch.tensor(NF4 if kind == "nf4" else FP4)
        codes, absmax = integers(0, 16, out_features * in_features), torch.rand(count) + 0.1
        state = SimpleNamespace(
            absmax=absmax,
            code=levels,
            blocksize=64,
            shape=(out_features, in_features),
            quant_type=kind,
            nested=nested,
        )
        if nested:
            inner = SimpleNamespace(
                absmax=torch.rand(-(-count // 256)) + 1, code=torch.linspace(-1, 1, 256), blocksize=256
            )
            state.absmax, state.state2, state.offset = integers(0, 256, count), inner, torch.tensor(2.0)
            absmax = inner.code[state.absmax.long()] * inner.absmax[torch.arange(count) // 256] + 2.0
        true = (levels[codes.long()].view(-1, 64) * absmax[:, None]).view(out_features, in_features)
        weight = nn.Parameter(pairs_of(codes, first_is_high=True)[:, None], requires_grad=False)
        made = cls(true, weight, bias)
        weight.quant_state = made.quant_state = state  # type: ignore[attr-defined]
        state.true = true
        return made


def dequantize_4bit(weight: Tensor, state: SimpleNamespace) -> Tensor:
    true: Tensor = state.true
    return true


class Linear8bitLt(Multiplies):
    @classmethod
    def random(cls, out_features: int, in_features: int, bias: Tensor | None) -> Linear8bitLt:
        q, scale = integers(-127, 128, out_features, in_features, dtype=torch.int8), torch.rand(out_features)
        weight = nn.Parameter(q, requires_grad=False)
        weight.CB, weight.SCB = weight.data, scale  # type: ignore[attr-defined]
        made = cls(q * (scale / 127)[:, None], weight, bias)
        made.state = SimpleNamespace(CB=None, SCB=None)
        return made


class HQQLinear(nn.Module):
    compute_dtype = torch.float32

    @classmethod
    def random(
        cls,
        out_features: int,
        in_features: int,
        bias: Tensor | None,
        bits: int,
        group: int | None,
        axis: int = 1,
    ) -> HQQLinear:
        made, size = cls(), group or in_features
        count = out_features * in_features // size
        shape, of_groups = ((count, size), (count, 1)) if axis == 1 else ((size, count), (1, count))
        q, scale, zero = integers(0, 2**bits, *shape), torch.rand(of_groups), torch.rand(of_groups) * 2**bits
        words, packing = cls.pack(q, bits)
        made.W_q = nn.Parameter(words, requires_grad=False)
        made.meta = {
            "nbits": bits,
            "group_size": group,
            "shape": torch.Size([out_features, in_features]),
            "scale": scale,
            "zero": zero,
            "axis": axis,
            "packing": packing,
            "view_as_float": False,
            "channel_wise": True,
        }
        made.true = ((q - zero) * scale).view(out_features, in_features)
        made.bias = bias  # not a parameter
        return made

    @staticmethod
    def pack(q: Tensor, bits: int) -> tuple[Tensor, str]:
        fields, width = (10, 32) if bits == 3 else (8 // bits, 8)
        rows = F.pad(q.int(), (0, 0, 0, -len(q) % fields)).view(fields, -1, q.shape[1])
        words = sum(rows[i] << bits * (fields - 1 - i) for i in range(fields))
        assert isinstance(words, Tensor)
        return (words, "3bit_32") if width == 32 else (words.to(torch.uint8), f"{bits}bit_u8")

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.true.to(input.dtype), self.bias)


class Wrapper(Tensor):
    """A tensor that only stands for the others among its attributes."""

    true: Tensor

    @classmethod
    def of(cls, true: Tensor, **attributes: Any) -> Any:
        made = Tensor._make_wrapper_subclass(cls, true.shape, dtype=true.dtype)
        vars(made).update(attributes, true=true)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [
            name for name, value in vars(self).items() if isinstance(value, Tensor) and name != "true"
        ], None

    @classmethod
    def __tensor_unflatten__(cls, *args: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            input, weight, bias = args
            return func(input, weight.true, bias)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:
            raise NotImplementedError(str(func))
        given = args[0]
        plain = {
            name: value.detach() if isinstance(value, Tensor) else value
            for name, value in vars(given).items()
        }
        return cls.of(plain.pop("true"), **plain)


class Int8Tensor(Wrapper):
    @classmethod
    def random(cls, out_features: int, in_features: int, *, rows_of_block: int = 1) -> Any:
        q = integers(-128, 128, out_features, in_features, dtype=torch.int8)
        shape = out_features // rows_of_block, 1
        scale, zero = torch.rand(shape), integers(-20, 20, *shape, dtype=torch.int8)
        true = (q - zero.repeat_interleave(rows_of_block, 0).int()) * scale.repeat_interleave(
            rows_of_block, 0
        )
        return cls.of(true, qdata=q, scale=scale, zero_point=zero, block_size=[rows_of_block, in_features])


class IntxUnpackedToInt8Tensor(Wrapper):
    @classmethod
    def random(cls, out_features: int, in_features: int, bits: int, group: int) -> Any:
        half = 2 ** (bits - 1)
        q = integers(-half, half, out_features, in_features, dtype=torch.int8)
        scale, zero = torch.rand(2, out_features, in_features // group).unbind(0)
        true = (q - zero.repeat_interleave(group, 1)) * scale.repeat_interleave(group, 1)
        return cls.of(
            true,
            qdata=q,
            scale=scale,
            zero_point=zero,
            block_size=[1, group],
            target_dtype=getattr(torch, f"int{bits}"),
        )


class Int4Tensor(Wrapper):
    @classmethod
    def random(cls, out_features: int, in_features: int, group: int) -> Any:
        q = integers(0, 16, out_features, in_features)
        scale, zero = torch.rand(2, in_features // group, out_features).unbind(0)
        true = (q.int() - 8) * scale.T.repeat_interleave(group, 1) + zero.T.repeat_interleave(group, 1)
        pairs = pairs_of((q ^ 8), first_is_high=False).view(out_features, -1)
        return cls.of(true, qdata=pairs, scale=scale, zero_point=zero, block_size=[1, group])


class Int4OpaqueTensor(Wrapper):
    @classmethod
    def random(cls, out_features: int, in_features: int, group: int) -> Any:
        q = integers(0, 16, out_features, in_features, dtype=torch.int32)
        pairs = torch.rand(in_features // group, out_features, 2)
        scale, middle = (part.T.repeat_interleave(group, 1) for part in pairs.unbind(-1))
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
        return cls.of((q - 8) * scale + middle, qdata=packed, scale_and_zero=pairs, block_size=[1, group])


class QLinear(Multiplies):
    """quanto's."""


class QTensor(Wrapper):
    axis = 0

    @classmethod
    def bytes(cls, out_features: int, in_features: int, dtype: torch.dtype = torch.int8) -> Any:
        q = integers(-100, 100, out_features, in_features, dtype=torch.int8).to(dtype)
        scale = torch.rand(out_features, 1)
        qtype = SimpleNamespace(
            name=f"q{dtype}".replace("torch.", ""), is_floating_point=dtype.is_floating_point
        )
        return cls.of(q.float() * scale, _data=q, _scale=scale, qtype=qtype)

    @classmethod
    def groups(
        cls, out_features: int, in_features: int, bits: int, group: int, *, whole_shift: bool = False
    ) -> Any:
        count, fields = out_features * in_features // group, 8 // bits
        q = integers(0, 2**bits, count, group)
        scale = torch.rand(count, 1)
        shift = integers(0, 2**bits, count, 1, dtype=torch.int8) if whole_shift else torch.rand(count, 1)
        true = scale * (q.int() - shift) if whole_shift else scale * q - shift
        rows = F.pad(q, (0, 0, 0, -count % fields)).view(fields, -1, group)
        words = torch.stack([rows[i] << bits * i for i in range(fields)]).sum(0).to(torch.uint8)
        return cls.of(
            true.view(out_features, in_features),
            _data=Wrapper.of(torch.empty(count, group, dtype=torch.uint8), _data=words, _bits=bits),
            _scale=scale,
            _shift=shift,
            _group_size=None if group == in_features else group,
            qtype=SimpleNamespace(name=f"qint{bits}", is_floating_point=False),
        )
