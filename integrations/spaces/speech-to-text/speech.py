"""Speech to text with whisper-tiny: the model, the limits of recordings, and the transcription with both models."""

from __future__ import annotations

import os
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy.signal import resample_poly

from hf_cpu_accel.serve.comparison import Comparison, Pair, compare_calls

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import Pipeline

HUB_NAME = "openai/whisper-tiny"
DTYPES = ("auto", "float32", "bfloat16", "int8")
SAMPLE = Path(__file__).parent / "sample.wav"
RATE = 16_000  # sampling rate of Whisper in Hz
LONGEST, SHORTEST = 30.0, 0.2  # seconds
HIGHEST_RATE = 192_000
MOST_TOKENS = 128


def load() -> Pipeline:
    """Load the pipeline of the folder or Hub name in SPEECH_MODEL, or else of whisper-tiny."""
    from transformers import pipeline

    name = os.environ.get("SPEECH_MODEL") or HUB_NAME
    return pipeline("automatic-speech-recognition", model=name, device="cpu", dtype="float32")


def samples_of(recording: tuple[int, NDArray] | None) -> NDArray[np.float32]:
    """Return a recording as mono float32 [samples] from -1 to 1, at 16 kHz.

    Args:
        recording: (sampling rate in Hz, integers or floats [samples] or [samples, channels]).

    Raises:
        ValueError: no recording, or one that is too short or too long.
    """
    if recording is None:
        raise ValueError("There is no recording; record one or choose a file.")
    rate, samples = recording
    if not 1_000 <= rate <= HIGHEST_RATE:
        raise ValueError(
            f"The sampling rate of the recording is {rate} Hz; 1,000 to {HIGHEST_RATE:,} Hz are accepted."
        )
    seconds = len(samples) / rate
    if not SHORTEST <= seconds <= LONGEST:
        raise ValueError(
            f"The recording takes {seconds:.1f} s; {SHORTEST:g} to {LONGEST:g} s are accepted. Cut it or choose another one."
        )
    if np.issubdtype(samples.dtype, np.integer):
        samples = samples / float(np.iinfo(samples.dtype).max)
    if samples.ndim == 2:
        samples = samples.mean(axis=1)
    common = gcd(rate, RATE)
    return resample_poly(samples, RATE // common, rate // common).astype(np.float32)


def transcribe(recognizer: Pipeline, samples: NDArray[np.float32]) -> str:
    """Return the text of float32 [samples]."""
    audio = {"raw": samples, "sampling_rate": RATE}  # a new dict, because the pipeline removes its entries
    most = min(MOST_TOKENS, recognizer.model.config.max_target_positions // 2)
    return recognizer(audio, generate_kwargs={"max_new_tokens": most})["text"].strip()


def measure(pair: Pair[Pipeline], samples: NDArray[np.float32]) -> Comparison:
    """Measure the time to transcribe the recording."""
    return compare_calls(
        lambda: transcribe(pair.eager, samples),
        lambda: transcribe(pair.accelerated, samples),
        amount=round(len(samples) / RATE, 1),
        unit="seconds of audio",
        rounds=1,
    )
