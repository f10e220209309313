"""Whisper's `generate`, segment by segment, in the loops of this package."""

import pytest
import torch
import transformers

from hf_cpu_accel import accelerate_for_cpu
from tests.generate.decoders import generation_items


def whisper():
    settings = {"vocab_size": 260, "d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
                "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "num_mel_bins": 16,
                "max_source_positions": 30, "max_target_positions": 60, "pad_token_id": 0, "eos_token_id": 1,
                "bos_token_id": 2, "decoder_start_token_id": 3}  # fmt: skip
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**settings)).eval()
    model.generation_config.suppress_tokens = [7, 8]
    model.generation_config.begin_suppress_tokens = [9]
    model.generation_config.no_timestamps_token_id = 200
    model.generation_config.max_initial_timestamp_index = 5
    return model


SEGMENTS = {
    "greedy": {},
    "beams": {"num_beams": 2},
    "scores": {"return_dict_in_generate": True, "output_scores": True},
    "timestamps": {"return_timestamps": True},
    "temperatures": {
        "temperature": (0.0, 0.5),
        "logprob_threshold": 0.0,
        "num_beams": 2,
        "return_timestamps": True,
    },
}


@pytest.mark.parametrize("case", SEGMENTS)
@pytest.mark.parametrize("frames", [60, 150])
def test_whisper_generates_its_segments_in_our_loops(case, frames, loops):
    """150 frames are three segments, which Whisper cuts by the timestamps."""
    model = whisper()
    given = {"max_new_tokens": 10, **SEGMENTS[case]}
    if frames > 60:
        given |= {"return_timestamps": True, "attention_mask": torch.ones(2, frames, dtype=torch.long)}
    features = torch.randn(2, 16, frames)
    torch.manual_seed(1)
    expected = model.generate(features, **given)
    accelerate_for_cpu(model, dtype="float32")
    assert generation_items(model)["greedy search and sampling"].reason is None
    torch.manual_seed(1)
    got = model.generate(features, **given)
    if isinstance(expected, dict):
        expected, got = expected["sequences"], got["sequences"]
    assert torch.equal(got, expected)
    assert len(loops) >= (2 if frames > 60 else 1)


def test_whisper_with_times_of_its_words_keeps_its_own_loop(loops):
    """They are read from attentions, which our decoder layers do not keep."""
    model = whisper()
    model.generation_config.alignment_heads = [[1, 0], [1, 2]]
    features = torch.randn(2, 16, 60)
    given = {"max_new_tokens": 6, "return_timestamps": True, "return_token_timestamps": True}
    expected = model.generate(features, **given)
    accelerate_for_cpu(model, dtype="float32")
    got = model.generate(features, **given)
    assert torch.equal(got["sequences"], expected["sequences"])
    torch.testing.assert_close(got["token_timestamps"], expected["token_timestamps"])
    assert loops == []
