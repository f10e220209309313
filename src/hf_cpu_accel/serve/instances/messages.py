"""Requests and results as bytes between two processes of one pool: pickles, in which tensors are numpy's, without torch's archive.

torch.multiprocessing would hand each tensor over as a file of shared memory: of a container's 64 MB, and dear for small ones.
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
        except (TypeError, RuntimeError):  # a dtype or a kind of tensor that numpy does not have
            return NotImplemented


def dumps(value: Any) -> bytes:
    """Raises what pickle raises."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def loads(message: bytes) -> Any:
    return pickle.loads(message)


def dumps_reply(value: Any) -> bytes:
    """A result or `Failed`, in which exceptions keep the text of their traceback; what cannot be sent is said in an exception."""
    try:
        return dumps([_sendable(part) for part in value] if isinstance(value, list) else _sendable(value))
    except Exception as error:
        text = f"what an instance gave cannot be sent from its process: {type(error).__name__}: {error}"
        failed = Failed(TypeError(text))
        return dumps([failed] * len(value) if isinstance(value, list) else failed)


def _sendable(value: Any) -> Any:
    if not isinstance(value, Failed):
        return value
    try:
        pickle.loads(pickle.dumps(value.error))  # some exceptions can be written but not read
    except Exception:
        return Failed(RuntimeError(f"{type(value.error).__name__}: {value.error}"))
    return Failed(ExceptionWithTraceback(value.error, value.error.__traceback__))


def _from_bits(bits: Any) -> Tensor:
    return torch.from_numpy(bits).view(torch.bfloat16)
