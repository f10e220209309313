"""One speech recognizer in service: recordings are computed one after another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hf_cpu_accel.serve.batching import Batcher
from hf_cpu_accel.serve.speech.audio import Samples, samples


@dataclass(frozen=True)
class Recording:
    """Samples at the model's rate, and options of its `generate`."""

    samples: Samples
    options: dict[str, Any] = field(default_factory=dict)


class Transcriber:
    """
    Args:
        name: what clients call it.
        recognize: a pipeline for automatic-speech-recognition, accelerated.
        waiting: recordings that may wait.
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
        """The codes of those that a request can name; none where the model knows one only."""
        config = getattr(self.model.model, "generation_config", None)
        tokens = getattr(config, "lang_to_id", None) or {}
        return frozenset(token.strip("<|>") for token in tokens)

    async def transcribe(self, recording: bytes, **options: Any) -> tuple[str, float]:
        """The text, and how many seconds the recording has.

        Raises:
            BadInput: it can't be decoded.
            Busy: too many wait.
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
                    True  # what Whisper needs to go on after its window of 30 seconds
                )
            texts.append(
                self.model({"raw": recording.samples, "sampling_rate": self.rate}, **options)["text"]
            )
        return texts
