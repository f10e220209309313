"""Speech to text with whisper-tiny: the model, the limits of a recording, and its text by both models."""

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
RATE = 16_000  # what Whisper hears
LONGEST, SHORTEST = 30.0, 0.2  # seconds
HIGHEST_RATE = 192_000
MOST_TOKENS = 128


def load() -> Pipeline:
    """The pipeline of the folder or hub name in SPEECH_MODEL, else whisper-tiny from the hub."""
    from transformers import pipeline

    name = os.environ.get("SPEECH_MODEL") or HUB_NAME
    return pipeline("automatic-speech-recognition", model=name, device="cpu", dtype="float32")


def heard(recording: tuple[int, NDArray] | None) -> NDArray[np.float32]:
    """A recording as float32 [samples] from -1 to 1, 16,000 a second; of several channels, their mean.

    Args:
        recording: samples a second; and integers or floats, [samples] or [samples, channels].

    Raises:
        ValueError: there is none, or it is too short or too long.
    """
    if recording is None:
        raise ValueError("Record something, or choose a file.")
    rate, samples = recording
    if not 1_000 <= rate <= HIGHEST_RATE:
        raise ValueError(
            f"The recording has {rate} samples a second; 1,000 to {HIGHEST_RATE:,} are possible."
        )
    seconds = len(samples) / rate
    if not SHORTEST <= seconds <= LONGEST:
        raise ValueError(
            f"The recording takes {seconds:.1f} s; {SHORTEST:g} to {LONGEST:g} s are possible: cut it, or take another one."
        )
    if np.issubdtype(samples.dtype, np.integer):
        samples = samples / float(np.iinfo(samples.dtype).max)
    if samples.ndim == 2:
        samples = samples.mean(axis=1)
    common = gcd(rate, RATE)
    return resample_poly(samples, RATE // common, rate // common).astype(np.float32)


def transcribe(recognizer: Pipeline, samples: NDArray[np.float32]) -> str:
    """What is said in float32 [samples]."""
    sound = {"raw": samples, "sampling_rate": RATE}  # the pipeline takes what is in it out of it
    most = min(MOST_TOKENS, recognizer.model.config.max_target_positions // 2)
    return recognizer(sound, generate_kwargs={"max_new_tokens": most})["text"].strip()


def measure(pair: Pair[Pipeline], samples: NDArray[np.float32]) -> Comparison:
    """How long each takes for the recording."""
    return compare_calls(
        lambda: transcribe(pair.eager, samples),
        lambda: transcribe(pair.accelerated, samples),
        amount=round(len(samples) / RATE, 1),
        unit="seconds of sound",
        rounds=1,
    )
