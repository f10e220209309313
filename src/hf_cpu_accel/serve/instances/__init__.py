"""Several instances of one model, each on cores of its own: `InstancePool` in this process, `launch` for whole scripts."""

from hf_cpu_accel.serve.instances.pool import InstancePool
from hf_cpu_accel.serve.instances.process_instance import InstanceDied

__all__ = ["InstanceDied", "InstancePool"]
