"""The tiers below the best one that this CPU runs, for `make test-tiers`."""

from __future__ import annotations

from hf_cpu_accel import extension
from tests.ops.test_tiers import available

if __name__ == "__main__":
    print(*(tier for tier in available if tier != extension.status().tier))
