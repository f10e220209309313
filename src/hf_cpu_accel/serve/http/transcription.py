"""`/v1/audio/transcriptions`, as OpenAI has it: a recording in a form, its words in JSON or as text."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, File, Form, Response, UploadFile
from fastapi.responses import JSONResponse, PlainTextResponse

from hf_cpu_accel.serve.http.errors import Refused
from hf_cpu_accel.serve.models import Models
from hf_cpu_accel.serve.speech.transcriber import Transcriber


def router(models: Models) -> APIRouter:
    """The endpoint around `models`."""
    routes = APIRouter()

    @routes.post("/v1/audio/transcriptions")
    async def transcriptions(
        file: Annotated[UploadFile, File()],
        model: Annotated[str | None, Form()] = None,
        language: Annotated[str | None, Form(max_length=20)] = None,
        response_format: Annotated[Literal["json", "text", "verbose_json"], Form()] = "json",
        temperature: Annotated[float, Form(ge=0, le=1)] = 0.0,
        prompt: Annotated[str | None, Form()] = None,
        stream: Annotated[bool, Form()] = False,
    ) -> Response:
        for name, asked in (("temperature", temperature), ("prompt", prompt), ("stream", stream)):
            if asked:
                raise Refused(422, f"{name} is not supported", parameter=name)
        transcriber: Transcriber = models.find(model, "transcribe")
        text, seconds = await transcriber.transcribe(await file.read(), **_options(transcriber, language))
        if response_format == "text":
            return PlainTextResponse(text)
        if response_format == "json":
            return JSONResponse({"text": text})
        return JSONResponse(
            {"task": "transcribe", "language": language or "", "duration": seconds, "text": text}
        )

    return routes


def _options(transcriber: Transcriber, language: str | None) -> dict[str, Any]:
    if language is None:
        return {}
    if language not in transcriber.languages:
        known = ", ".join(sorted(transcriber.languages)) or "none, the model knows one language only"
        raise Refused(422, f"language={language!r} is unknown; known: {known}", parameter="language")
    return {"language": language}
