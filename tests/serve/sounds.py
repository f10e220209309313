"""Sounds, WAV files of them, and a small recognizer."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    Wav2Vec2Config,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
    pipeline,
)

RATE = 16_000


def tone(seconds: float = 0.25, rate: int = RATE, hertz: float = 440.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def wav(sound: np.ndarray, rate: int = RATE, width: int = 2, channels: int = 1) -> bytes:
    """A WAV file with PCM samples of `width` bytes, the same in each channel."""
    out = io.BytesIO()
    scaled = np.repeat(np.round(sound * (2 ** (8 * width - 1) - 1)).astype(np.int64), channels)
    if width == 1:
        data = (scaled + 128).astype(np.uint8).tobytes()
    else:
        data = scaled.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width].tobytes()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data)
    return out.getvalue()


def recognizer(folder: Path) -> Any:
    """Return a pipeline with a tiny Wav2Vec2; its vocabulary is written to `folder`."""
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefgh"]
    (folder / "vocab.json").write_text(json.dumps({letter: number for number, letter in enumerate(letters)}))
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        vocab_size=len(letters), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        conv_dim=(16, 16), conv_stride=(20, 16), conv_kernel=(20, 16), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, pad_token_id=0,
    )  # fmt: skip
    model = Wav2Vec2ForCTC(config).eval()
    with torch.no_grad():
        model.lm_head.weight.normal_(std=2.0)
    tokenizer = Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
    extractor = Wav2Vec2FeatureExtractor(sampling_rate=RATE)
    return pipeline(
        "automatic-speech-recognition",
        model=model,
        tokenizer=tokenizer,
        feature_extractor=extractor,
        device="cpu",
    )
