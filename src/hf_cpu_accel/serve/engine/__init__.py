"""Continuous batching: the sequences of many clients share each decode step and the KV cache of common prefixes."""

from hf_cpu_accel.serve.engine.engine import Engine
from hf_cpu_accel.serve.engine.generation import Generation, GenerationRequest
from hf_cpu_accel.serve.engine.metrics import Metrics
from hf_cpu_accel.serve.limits import Busy, Stopping

__all__ = ["Busy", "Engine", "Generation", "GenerationRequest", "Metrics", "Stopping"]
