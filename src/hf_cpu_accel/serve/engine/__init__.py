"""One causal language model for many clients: their sequences share each step, and the beginnings that they have in common."""

from hf_cpu_accel.serve.engine.engine import Engine
from hf_cpu_accel.serve.engine.generation import Generation, GenerationRequest
from hf_cpu_accel.serve.engine.metrics import Metrics
from hf_cpu_accel.serve.limits import Busy, Stopping

__all__ = ["Busy", "Engine", "Generation", "GenerationRequest", "Metrics", "Stopping"]
