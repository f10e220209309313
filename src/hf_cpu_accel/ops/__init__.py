"""The ops behind everything: `torch.ops.hf_cpu_accel.*`. One file per family: function, reference, fake kernel."""
