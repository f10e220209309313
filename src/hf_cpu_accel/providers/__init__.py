"""The choice between this package's kernels and other providers in torch (oneDNN, BLAS), by measurement.

The candidates are measured once per op, weight dtype, input dtype, N, K and range of row counts, when a model first needs them. The
result is cached on disk for this machine. CPUs with AMX get oneDNN's AMX kernels this way.

    torch_ops.py   the candidates: the only file that names torch's unstable ops
    autotune.py    the interleaved measurement; the own kernels win unless they are clearly slower
    budget.py      the time budget of measurements in a process
    store.py       the results on disk
    machine.py     the key of a machine that results are valid for
    switch.py      whether to measure at all
    choice.py      combines these: (work, rows) -> Choice
    route.py       the hot path: one look-up per call
    layer.py       whether a fused layer should use this package's kernels everywhere
"""
