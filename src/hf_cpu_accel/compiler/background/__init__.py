"""`accelerate_for_cpu(..., compile="background")`: what tier 1 did not fuse is compiled while tier 1 serves.

    first call ──► tier 1 answers ──► the block and its arguments go to a child process
                                      export ──► our passes ──► AOTInductor ──► artifact on disk
    later calls ─► tier 1 answers, now and then the compiled form runs beside it ──► agrees and faster? it takes over

The user's process never traces, compiles or imports Inductor: it loads a finished library. What may change between calls is
looked at before each call (`bound.py`); a call for which the library was not made takes tier 1.
"""
