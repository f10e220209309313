"""A folder with a tiny Whisper of random weights that says letters: what `SPEECH_MODEL` names where there is no network."""

from __future__ import annotations

from pathlib import Path

import transformers as tf

from tests.tasks.audio import whisper
from tests.tasks.case import random_model

_ASCII = 94  # of the bytes, sorted as their names are, these come first


def write_whisper(folder: Path) -> None:
    recognizer = whisper()
    generation, config = recognizer.model.generation_config, recognizer.model.config
    config.max_source_positions = (
        200  # four seconds: longer ones are heard in pieces, which takes times in the vocabulary
    )
    recognizer.feature_extractor = tf.WhisperFeatureExtractor(feature_size=16, chunk_length=4)
    recognizer.model = random_model("WhisperForConditionalGeneration", config)
    recognizer.model.generation_config = generation
    generation.suppress_tokens = [0, 1, *range(2 + _ASCII, generation.no_timestamps_token_id + 1)]
    recognizer.save_pretrained(folder)
