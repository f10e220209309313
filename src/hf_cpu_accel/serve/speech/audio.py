"""Recordings to samples: by transformers' decoders where one is installed, WAV files without any."""

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
    """Float32 [samples] from -1 to 1, of one channel, `rate` of them per second.

    Raises:
        BadInput: it is no recording, or one in a format that nothing here can decode.
    """
    if is_torchcodec_available() or (is_soundfile_available() and is_soxr_available()):
        try:
            return np.asarray(
                load_audio(base64.b64encode(recording).decode(), sampling_rate=rate), dtype=np.float32
            )
        except Exception as error:  # each decoder has exceptions of its own
            raise BadInput(f"file: it can't be decoded: {error}") from error
    return resampled(*wav_samples(recording), rate)


def wav_samples(recording: bytes) -> tuple[Samples, int]:
    """Of a WAV file with PCM samples of 8, 16, 24 or 32 bits: the mean of its channels, and the rate.

    Raises:
        BadInput: it is something else.
    """
    try:
        with wave.open(io.BytesIO(recording)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            data = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise BadInput(
            f"file: not a WAV file of PCM samples ({error}); for other formats the server needs: pip install soundfile soxr"
        ) from error
    whole = np.frombuffer(data, dtype=np.uint8)[: len(data) // (width * channels) * (width * channels)]
    if not whole.size or not rate:
        raise BadInput("file: the recording is empty")
    if width == 1:  # the only ones without a sign
        signed = (whole.astype(np.float32) - 128) / 128
    else:
        # The bytes of each sample at the upper end of 32 bits, which keeps the sign.
        wide = np.zeros((whole.size // width, 4), dtype=np.uint8)
        wide[:, 4 - width :] = whole.reshape(-1, width)
        signed = wide.view("<i4")[:, 0].astype(np.float32) / 2**31
    return signed.reshape(-1, channels).mean(axis=1, dtype=np.float32), rate


def resampled(samples: Samples, rate: int, wanted: int) -> Samples:
    """The same sound with `wanted` samples per second: its spectrum, cut or continued with zeros."""
    if rate == wanted:
        return samples
    count = math.ceil(len(samples) * wanted / rate)
    # With silence at the end so that both lengths are whole numbers of samples of the same time.
    step, step_wanted = rate // math.gcd(rate, wanted), wanted // math.gcd(rate, wanted)
    steps = math.ceil(len(samples) / step)
    spectrum = np.fft.rfft(samples, steps * step)
    sound = np.fft.irfft(spectrum[: steps * step_wanted // 2 + 1], steps * step_wanted) * (step_wanted / step)
    return np.asarray(sound[:count], dtype=np.float32)
