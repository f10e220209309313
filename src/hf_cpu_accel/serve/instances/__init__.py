"""Several instances of one model, each pinned to its own cores: `InstancePool` for a model, `launch` for scripts."""

from hf_cpu_accel.serve.instances.pool import InstancePool
from hf_cpu_accel.serve.instances.process_instance import InstanceDied

__all__ = ["InstanceDied", "InstancePool"]
