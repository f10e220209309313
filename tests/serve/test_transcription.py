"""`/v1/audio/transcriptions`: WAV files of every width, other rates, and a tiny recognizer against transformers' own pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from starlette.testclient import TestClient

from hf_cpu_accel.serve.http.app import Service
from hf_cpu_accel.serve.limits import BadInput
from hf_cpu_accel.serve.models import Models
from hf_cpu_accel.serve.speech.audio import resample, samples, wav_samples
from hf_cpu_accel.serve.speech.transcriber import Transcriber
from tests.serve import sounds
from tests.serve.sounds import RATE, tone, wav


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_pcm_of_every_width(width: int, channels: int) -> None:
    found, rate = wav_samples(wav(tone(), width=width, channels=channels))
    assert (rate, found.dtype) == (RATE, np.float32)
    np.testing.assert_allclose(found, tone(), atol=2.0 ** (2 - 8 * width) + 1e-6)


@pytest.mark.parametrize("rate", [8_000, 11_025, 16_000, 44_100, 48_000])
def test_resampling_preserves_the_audio(rate: int) -> None:
    found = resample(tone(0.5, rate).astype(np.float32), rate, RATE)
    assert len(found) == RATE // 2
    middle = slice(RATE // 8, -RATE // 8)
    np.testing.assert_allclose(found[middle], tone(0.5)[middle], atol=5e-3)


def test_resampling_removes_high_frequencies() -> None:
    found = resample(tone(0.5, 48_000, hertz=12_000.0).astype(np.float32), 48_000, RATE)
    assert np.abs(found).max() < 1e-3


@pytest.mark.parametrize("recording", [b"", b"RIFF", b"ID3 something else", wav(np.zeros(0))])
def test_invalid_recordings_are_rejected(recording: bytes) -> None:
    with pytest.raises(BadInput, match="file: "):
        samples(recording, RATE)


@pytest.fixture(scope="module")
def recognizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return sounds.recognizer(tmp_path_factory.mktemp("speech"))


@pytest.fixture
def client(recognizer: Any) -> Iterator[TestClient]:
    transcriber = Transcriber("ears", recognizer)
    with TestClient(
        Service(Models([transcriber]), max_upload=100_000).app, raise_server_exceptions=False
    ) as client:
        yield client
    assert transcriber.close(30)


def test_recordings_are_transcribed(client: TestClient, recognizer: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sound = rng.uniform(-0.5, 0.5, RATE // 2)
    expected = recognizer({"raw": wav_samples(wav(sound))[0], "sampling_rate": RATE})["text"]
    assert expected
    (tmp_path / "sound.wav").write_bytes(wav(sound))
    ai = openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=client, max_retries=0)  # type: ignore[arg-type]
    with (tmp_path / "sound.wav").open("rb") as file:
        assert ai.audio.transcriptions.create(model="ears", file=file).text == expected
    form = {"file": ("sound.wav", wav(sound))}
    assert (
        client.post("/v1/audio/transcriptions", files=form, data={"response_format": "text"}).text == expected
    )
    told = client.post(
        "/v1/audio/transcriptions", files=form, data={"response_format": "verbose_json"}
    ).json()
    assert (told["text"], told["duration"]) == (expected, 0.5)


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"model": "other"}, 404, "model 'other' does not exist"),
        ({"language": "de"}, 400, "language='de' is unknown; accepted: none"),
        ({"prompt": "Words."}, 400, "prompt='Words.' is not supported; accepted: ''"),
        ({"temperature": "0.5"}, 400, "temperature=0.5 is not supported; accepted: 0.0"),
        ({"temperature": "-1"}, 400, "temperature: Input should be greater than or equal to 0"),
        (
            {"response_format": "srt"},
            400,
            "response_format: Input should be 'json', 'text' or 'verbose_json'",
        ),
    ],
)
def test_wrong_requests_are_rejected(
    client: TestClient, fields: dict[str, str], status: int, message: str
) -> None:
    response = client.post("/v1/audio/transcriptions", files={"file": ("a.wav", wav(tone()))}, data=fields)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]


def test_malformed_forms(client: TestClient) -> None:
    assert (
        client.post("/v1/audio/transcriptions", files={"file": ("a.wav", b"a" * 200_000)}).status_code == 413
    )
    assert client.post("/v1/audio/transcriptions", files={"file": ("a.mp3", b"ID3")}).status_code == 400
    assert client.post("/v1/audio/transcriptions", data={"file": "text"}).status_code == 400
    assert client.post("/v1/audio/transcriptions", json={"file": "text"}).status_code == 400
    broken = client.post(
        "/v1/audio/transcriptions", content=b"--x", headers={"content-type": "multipart/form-data"}
    )
    assert broken.status_code == 400
    assert broken.json()["error"]["message"]
