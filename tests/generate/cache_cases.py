"""The cache of this package and that of transformers, with the same calls."""

import torch
from transformers import DynamicCache, Gemma2Config, LlamaConfig

from hf_cpu_accel.generate.cache import CPUCache

HEADS, DIM, WINDOW = 2, 8, 24
_SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": HEADS, "vocab_size": 50}
LLAMA = LlamaConfig(num_hidden_layers=2, **_SIZES)
GEMMA = Gemma2Config(num_hidden_layers=3, sliding_window=WINDOW, head_dim=DIM, **_SIZES)
CONFIGS = {"full": LLAMA, "sliding and full": GEMMA}


def states(batch, length, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, batch, HEADS, length, DIM, generator=generator).to(dtype).unbind(0)


class Both:
    """One call after another on both caches, compared after each."""

    def __init__(self, config, record=False):
        self.ours, self.theirs = CPUCache(config), DynamicCache(config=config)
        self.seed = 0
        if record:
            self.ours.activate_past_recording()
            self.theirs.activate_past_recording()

    def update(self, batch, length):
        for layer in range(len(self.theirs)):
            assert self.ours.get_mask_sizes(length, layer) == self.theirs.get_mask_sizes(length, layer)
            self.seed += 1
            keys, values = states(batch, length, self.seed)
            returned = self.ours.update(keys, values, layer)
            expected = self.theirs.update(keys, values, layer)
            for ours, theirs in zip(returned, expected, strict=True):
                assert torch.equal(ours, theirs)
        self.check()

    def both(self, name, *arguments):
        getattr(self.ours, name)(*arguments)
        getattr(self.theirs, name)(*arguments)
        self.check()

    def check(self):
        for index, theirs in enumerate(self.theirs.layers):
            ours = self.ours.layers[index]
            assert self.ours.get_seq_length(index) == self.theirs.get_seq_length(index)
            assert self.ours.is_recording_past(index) == self.theirs.is_recording_past(index)
            if theirs.get_seq_length():
                assert torch.equal(ours.keys, theirs.keys)
                assert torch.equal(ours.values, theirs.values)
