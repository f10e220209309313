"""`accelerate_for_cpu(..., compile="background")`: compile the blocks that no rule fused, while calls run as before.

Level 1 is the accelerated model without compiled blocks.

    first call ──► level 1 runs ──► the block and its arguments go to a child process
                                   export ──► passes ──► AOTInductor ──► artifact on disk
    later calls ─► level 1 runs, some calls run the compiled form too ──► equal and faster: the compiled form replaces level 1

The user's process never traces, compiles or imports Inductor: it loads a finished library. Before each call `bound.py` checks the
values that may change between calls. A call that does not fit the library runs level 1.
"""
