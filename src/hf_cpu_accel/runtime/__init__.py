"""The process and the machine: threads, heap, control groups, CPU topology, folders on disk.

Import the modules one by one (``from hf_cpu_accel.runtime import threads``): this package imports nothing
itself, so that reading the topology does not cost an import of torch.
"""
