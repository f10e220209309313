"""The Space `speech-to-text` without its page: a tiny Whisper of random weights."""

import numpy as np
import pytest
from scipy.io import wavfile

from hf_cpu_accel.serve.comparison import Pair
from tests.spaces.folders import module_of
from tests.spaces.whisper import write_whisper

speech = module_of("speech-to-text", "speech")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("whisper")
    write_whisper(path)
    return path


@pytest.fixture
def pair(folder, monkeypatch):
    monkeypatch.setenv("SPEECH_MODEL", str(folder))
    return Pair(speech.load(), dtype="float32")


def tone(rate, seconds=1.0, hertz=440.0):
    return np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)


def test_both_models_transcribe_the_same(pair):
    samples = speech.samples_of((16_000, tone(16_000)))
    text = speech.transcribe(pair.eager, samples)
    assert text
    assert speech.transcribe(pair.accelerated, samples) == text
    assert speech.transcribe(pair.eager, samples) == text, "the recording is left as it was"
    comparison = speech.measure(pair, samples)
    assert (comparison.amount, comparison.unit) == (1.0, "seconds of audio")


def test_sample_can_be_heard():
    rate, samples = wavfile.read(speech.SAMPLE)
    sound = speech.samples_of((rate, samples))
    assert 2 < len(sound) / speech.RATE < speech.LONGEST
    assert 0.1 < np.abs(sound).max() <= 1.01


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100, 48_000])
@pytest.mark.parametrize("dtype", ["int16", "int32", "float32"])
@pytest.mark.parametrize("channels", [None, 1, 2])
def test_recordings_of_all_kinds_become_the_same_sound(rate, dtype, channels):
    expected = tone(16_000)
    samples = tone(rate) if dtype == "float32" else tone(rate) * (np.iinfo(dtype).max // 2)
    samples = samples.astype(dtype)
    if channels is not None:
        samples = np.stack([samples] * channels, axis=1)
    sound = speech.samples_of((rate, samples))
    assert sound.dtype == np.float32
    assert sound.shape == (16_000,)
    scale = 1.0 if dtype == "float32" else 0.5
    middle = slice(1_000, -1_000)  # the filter rings at both ends
    assert np.abs(sound - scale * expected)[middle].max() < 0.02


@pytest.mark.parametrize(
    ("recording", "message"),
    [
        (None, "There is no recording"),
        ((16_000, np.zeros(0, np.int16)), "takes 0.0 s; 0.2 to 30 s"),
        ((16_000, np.zeros(16_000 * 31, np.int16)), "takes 31.0 s"),
        ((10, np.zeros(100, np.int16)), "rate of the recording is 10 Hz"),
        ((10**9, np.zeros(100, np.int16)), "rate of the recording is 1000000000 Hz"),
    ],
)
def test_invalid_recordings_are_rejected(recording, message):
    with pytest.raises(ValueError, match=message):
        speech.samples_of(recording)
