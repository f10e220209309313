"""`/v1/audio/transcriptions` of the OpenAI API: audio in a form, its text as JSON or plain text."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Form, Response, UploadFile
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from hf_cpu_accel.serve.http.errors import Refused
from hf_cpu_accel.serve.http.unsupported import Neutral, reject_unsupported
from hf_cpu_accel.serve.models import Models
from hf_cpu_accel.serve.speech.transcriber import Transcriber


class TranscriptionForm(BaseModel):
    """The form of `POST /v1/audio/transcriptions`. It is not strict, because forms contain only texts."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    neutral: ClassVar[Neutral] = {"temperature": (0.0,), "prompt": ("",), "stream": (False,)}

    file: UploadFile
    model: str | None = None
    language: Annotated[str, Field(max_length=20)] | None = None
    response_format: Literal["json", "text", "verbose_json"] = "json"
    temperature: Annotated[float, Field(ge=0, le=1)] = 0.0
    prompt: str | None = None
    stream: bool = False

    @model_validator(mode="after")
    def _reject_unsupported(self) -> TranscriptionForm:
        reject_unsupported(vars(self), self.neutral)
        return self


def router(models: Models) -> APIRouter:
    """Return the endpoint for `models`."""
    routes = APIRouter()

    @routes.post("/v1/audio/transcriptions")
    async def transcriptions(form: Annotated[TranscriptionForm, Form()]) -> Response:
        transcriber: Transcriber = models.find(form.model, "transcribe")
        text, seconds = await transcriber.transcribe(
            await form.file.read(), **_options(transcriber, form.language)
        )
        if form.response_format == "text":
            return PlainTextResponse(text)
        if form.response_format == "json":
            return JSONResponse({"text": text})
        return JSONResponse(
            {"task": "transcribe", "language": form.language or "", "duration": seconds, "text": text}
        )

    return routes


def _options(transcriber: Transcriber, language: str | None) -> dict[str, Any]:
    if language is None:
        return {}
    if language not in transcriber.languages:
        accepted = ", ".join(sorted(transcriber.languages)) or "none, the model has only one language"
        raise Refused(422, f"language={language!r} is unknown; accepted: {accepted}", parameter="language")
    return {"language": language}
