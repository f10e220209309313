"""The ops of recurrent layers between their projections, one op for each kind of layer."""

from hf_cpu_accel.ops.recurrent import (
    gated_delta_net,
    lstm_layer,
    selective_scan,
    short_convolution,
    state_space,
)

__all__ = ["gated_delta_net", "lstm_layer", "selective_scan", "short_convolution", "state_space"]
