"""The process and the machine: threads, heap, control groups, CPU topology, folders on disk.

Import the modules separately (``from hf_cpu_accel.runtime import threads``). The package itself imports nothing, so reading the
topology does not import torch.
"""
