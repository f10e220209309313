"""`torch.compile(model, backend="hf_cpu_accel")`: passes rewrite the graph to fused ops, and Inductor compiles the rest.

    Dynamo's graph ──► capture ──► passes ──► compile_fx ──► bind
                       the same    patterns   Inductor's     hands the packed
                       in ATen     become     code for       weights to each call
                       ops         our ops    what is left

torch finds the backend by the entry point `torch_dynamo_backends`, and imports it at its first use.
"""
