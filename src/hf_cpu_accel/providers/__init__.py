"""Who multiplies: our kernels, or another provider inside torch where that was measured to be faster.

For each op, weight dtype, dtype of the input, N, K and range of row counts the candidates run against each other once, when a
model first needs them. The answer is kept on disk for this machine. This is also how CPUs with AMX get oneDNN's AMX kernels.

    torch_ops.py   the candidates: the only file that names torch's unstable ops
    autotune.py    ours against the others: interleaved, and ours wins unless it clearly loses
    budget.py      how long measuring may hold a process up
    store.py       the answers on disk
    machine.py     what an answer is valid for
    switch.py      whether anything is measured at all
    choice.py      puts these together: (work, rows) -> Choice
    route.py       the hot path: one look-up per call
    layer.py       the question of a fused layer: is it ours everywhere?
"""
