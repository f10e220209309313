"""Decode recordings to samples, with the decoders of transformers if one is installed; WAV files need none."""

from __future__ import annotations

import base64
import io
import math
import wave
from typing import Any

import numpy as np
from transformers.audio_utils import load_audio
from transformers.utils import is_soundfile_available, is_soxr_available
from transformers.utils.import_utils import is_torchcodec_available

from hf_cpu_accel.serve.limits import BadInput

Samples = np.ndarray[Any, np.dtype[np.float32]]


def samples(recording: bytes, rate: int) -> Samples:
    """Decode a recording to mono float32 [samples] from -1 to 1 with this sampling rate in Hz.

    Raises:
        BadInput: not a recording, or a format that no installed decoder supports.
    """
    if is_torchcodec_available() or (is_soundfile_available() and is_soxr_available()):
        try:
            return np.asarray(
                load_audio(base64.b64encode(recording).decode(), sampling_rate=rate), dtype=np.float32
            )
        except Exception as error:  # each decoder has its own exceptions
            raise BadInput(
                f"file: the audio cannot be decoded: {error}; send a valid audio file, such as WAV or FLAC"
            ) from error
    return resample(*wav_samples(recording), rate)


def wav_samples(recording: bytes) -> tuple[Samples, int]:
    """Decode a WAV file with PCM samples of 8, 16, 24 or 32 bits; return the mean of its channels and the sampling rate.

    Raises:
        BadInput: another format, or no samples.
    """
    try:
        with wave.open(io.BytesIO(recording)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            data = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise BadInput(
            f"file: not a WAV file with PCM samples ({error}); for other formats, run pip install soundfile soxr on the server"
        ) from error
    bytes_of_frames = np.frombuffer(data, dtype=np.uint8)[
        : len(data) // (width * channels) * (width * channels)
    ]
    if not bytes_of_frames.size or not rate:
        raise BadInput("file: the recording is empty; send a recording with at least one sample")
    if width == 1:  # 8-bit samples are unsigned
        signed = (bytes_of_frames.astype(np.float32) - 128) / 128
    else:
        # The bytes of each sample at the upper end of 32 bits, which preserves the sign.
        wide = np.zeros((bytes_of_frames.size // width, 4), dtype=np.uint8)
        wide[:, 4 - width :] = bytes_of_frames.reshape(-1, width)
        signed = wide.view("<i4")[:, 0].astype(np.float32) / 2**31
    return signed.reshape(-1, channels).mean(axis=1, dtype=np.float32), rate


def resample(samples: Samples, rate: int, new_rate: int) -> Samples:
    """Resample to another rate in Hz by cutting the spectrum or extending it with zeros."""
    if rate == new_rate:
        return samples
    count = math.ceil(len(samples) * new_rate / rate)
    # Silence at the end makes both lengths whole numbers of samples.
    step, new_step = rate // math.gcd(rate, new_rate), new_rate // math.gcd(rate, new_rate)
    steps = math.ceil(len(samples) / step)
    spectrum = np.fft.rfft(samples, steps * step)
    audio = np.fft.irfft(spectrum[: steps * new_step // 2 + 1], steps * new_step) * (new_step / step)
    return np.asarray(audio[:count], dtype=np.float32)
