"""A speech recognizer of the server, which transcribes recordings one after another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hf_cpu_accel.serve.batching import Batcher
from hf_cpu_accel.serve.speech.audio import Samples, samples


@dataclass(frozen=True)
class Recording:
    """Samples at the sampling rate of the model, and options of its `generate`."""

    samples: Samples
    options: dict[str, Any] = field(default_factory=dict)


class Transcriber:
    """Serve a speech recognizer.

    Args:
        name: the name for clients.
        recognize: an accelerated pipeline for automatic-speech-recognition.
        waiting: maximum number of waiting recordings.
        prepare: see `Batcher`.
    """

    capabilities = ("transcribe",)

    def __init__(
        self, name: str, recognize: Any, *, waiting: int = 16, prepare: Callable[[int], object] | None = None
    ) -> None:
        self.name, self.model = name, recognize
        self.rate: int = recognize.feature_extractor.sampling_rate
        self._is_whisper = recognize.type == "seq2seq_whisper"
        self._queue: Batcher[Recording, str] = Batcher(
            self._compute,
            max_tokens=1,
            max_wait=0,
            max_waiting=waiting,
            prepare=prepare,
            name=f"transcriber {name}",
        )

    @property
    def waiting(self) -> int:
        return self._queue.waiting

    @property
    def languages(self) -> frozenset[str]:
        """Return the codes of the languages that a request can name; empty if the model has only one language."""
        config = getattr(self.model.model, "generation_config", None)
        tokens = getattr(config, "lang_to_id", None) or {}
        return frozenset(token.strip("<|>") for token in tokens)

    async def transcribe(self, recording: bytes, **options: Any) -> tuple[str, float]:
        """Return the text of a recording and its duration in seconds.

        Args:
            recording: the bytes of an audio file.
            options: options of `generate`, such as language.

        Raises:
            BadInput: the recording cannot be decoded.
            Busy: the queue is full.
        """
        decoded = await asyncio.to_thread(samples, recording, self.rate)
        [future] = self._queue.submit([Recording(decoded, options)], [1])
        return await asyncio.wrap_future(future), len(decoded) / self.rate

    def close(self, timeout: float | None = None) -> bool:
        return self._queue.close(timeout)

    def _compute(self, recordings: list[Recording]) -> list[str]:
        texts = []
        for recording in recordings:
            options: dict[str, Any] = {"generate_kwargs": recording.options} if recording.options else {}
            if self._is_whisper and len(recording.samples) > 30 * self.rate:
                options["return_timestamps"] = (
                    True  # Whisper needs timestamps to continue after its window of 30 seconds
                )
            texts.append(
                self.model({"raw": recording.samples, "sampling_rate": self.rate}, **options)["text"]
            )
        return texts
