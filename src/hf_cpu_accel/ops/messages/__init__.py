"""Messages of edges, made and reduced in one pass: the ops, their gradients, and their references."""

from hf_cpu_accel.ops.messages import gradients, messages

__all__ = ["gradients", "messages"]
