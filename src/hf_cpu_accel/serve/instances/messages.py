"""Messages between the processes of a pool: pickles in which tensors are NumPy arrays.

torch.multiprocessing would pass each tensor as a file in shared memory. That is slow for small tensors, and containers limit shared
memory to 64 MB.
"""

from __future__ import annotations

import io
import pickle
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.serve.instances.work import Failed


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.device.type != "cpu" or value.layout is not torch.strided:
            return NotImplemented
        plain = value.detach().contiguous()
        if plain.dtype is torch.bfloat16:
            return _from_bits, (plain.view(torch.int16).numpy(),)
        try:
            return torch.from_numpy, (plain.numpy(),)
        except (TypeError, RuntimeError):  # a dtype or a kind of tensor that NumPy does not support
            return NotImplemented


def dumps(value: Any) -> bytes:
    """Pickle a value; raises the exceptions of pickle."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def loads(message: bytes) -> Any:
    """Unpickle a message."""
    return pickle.loads(message)


def dumps_reply(value: Any) -> bytes:
    """Pickle a result or `Failed`. Exceptions keep their traceback as text; a value that cannot be pickled becomes `Failed`."""
    try:
        return dumps([_sendable(part) for part in value] if isinstance(value, list) else _sendable(value))
    except Exception as error:
        text = (
            f"the result of an instance cannot be pickled ({type(error).__name__}: {error}); return tensors or plain "
            "values, or use kind='thread'"
        )
        failed = Failed(TypeError(text))
        return dumps([failed] * len(value) if isinstance(value, list) else failed)


def _sendable(value: Any) -> Any:
    if not isinstance(value, Failed):
        return value
    try:
        pickle.loads(pickle.dumps(value.error))  # some exceptions can be pickled but not unpickled
    except Exception:
        return Failed(RuntimeError(f"{type(value.error).__name__}: {value.error}"))
    return Failed(ExceptionWithTraceback(value.error, value.error.__traceback__))


def _from_bits(bits: Any) -> Tensor:
    return torch.from_numpy(bits).view(torch.bfloat16)
