"""Classes that combine a fused class and the original."""

from __future__ import annotations

import torch
import transformers as tf

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.rewrite.encoder.layer import FusedEncoderLayer


def test_transformers_does_not_wrap_the_fused_forward_for_gradient_checkpointing() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 96}
    model = tf.BertModel(tf.BertConfig(vocab_size=99, **sizes)).eval()
    original = type(model.encoder.layer[0])
    accelerate_for_cpu(model, dtype="float32")
    fused = type(model.encoder.layer[0])
    assert issubclass(fused, original)
    assert fused.forward is FusedEncoderLayer.forward
    assert original.forward is not fused.forward
    assert model(torch.randint(3, 99, (1, 5)))[0].isfinite().all()
