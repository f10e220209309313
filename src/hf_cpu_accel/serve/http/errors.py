"""Error responses: a status, and a message in the format of the API."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from hf_cpu_accel.serve.http.unsupported import KIND
from hf_cpu_accel.serve.limits import BadInput, Busy, Stopping, TooLong
from hf_cpu_accel.serve.models import UnknownModel

logger = logging.getLogger(__name__)


@dataclass
class Refused(Exception):
    """A request that is rejected.

    Attributes:
        status: HTTP status.
        message: text of the error.
        code: error code of the OpenAI API, if there is one.
        parameter: the field of the request that is wrong.
    """

    status: int
    message: str
    code: str | None = None
    parameter: str | None = None


_EXPECTED = (Refused, UnknownModel, BadInput, TooLong, Busy, Stopping)
# Error types of text-embeddings-inference.
_TYPES = {
    413: "Validation",
    422: "Validation",
    424: "Backend",
    429: "Overloaded",
    500: "Backend",
    503: "Unhealthy",
}
# Error types of the OpenAI API.
_OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def refused(error: Exception) -> Refused:
    """Return the rejection for an exception of an endpoint."""
    match error:
        case Refused():
            return error
        case Busy():
            return Refused(429, str(error), "rate_limit_exceeded")
        case Stopping():
            return Refused(503, str(error), "server_stopping")
        case TooLong():
            return Refused(413, str(error), "context_length_exceeded")
        case UnknownModel():
            return Refused(404, str(error), "model_not_found", "model")
        case RequestValidationError():
            return _invalid(error)
        case HTTPException():
            return Refused(error.status_code, str(error.detail))
        case BadInput():
            return Refused(422, str(error))
    logger.error("a request failed", exc_info=error)
    return Refused(500, f"{type(error).__name__}: {error}")


def _invalid(error: RequestValidationError) -> Refused:
    errors = error.errors()
    if any(one["type"] == "json_invalid" for one in errors):
        return Refused(400, "the body is not valid JSON; send a JSON object")
    message = "; ".join(_sentence(one) for one in errors[:5])
    return Refused(422, message, parameter=_path(errors[0]) or None)


def _path(error: Mapping[str, Any]) -> str:
    """Return the path of a field in the body; "" for the body."""
    return ".".join(map(str, error["loc"][1:]))


def _sentence(error: Mapping[str, Any]) -> str:
    """Return the field, the problem, and the value if it is a number, a text or a list."""
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == KIND:
        return message
    value = error.get("input")
    is_plain = isinstance(value, str | int | float | list) and error["type"] != "extra_forbidden"
    return f"{_path(error) or 'the body'}: {message}" + (f"; got {reprlib.repr(value)}" if is_plain else "")


def error_response(path: str, error: Refused) -> JSONResponse:
    """Return the response to a request for `path`, in the error format of its API."""
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if not path.startswith("/v1/"):
        body: dict[str, object] = {
            "error": error.message,
            "error_type": _TYPES.get(error.status, "Validation"),
        }
        return JSONResponse(body, error.status, headers)
    # The OpenAI API answers invalid fields with 400.
    return JSONResponse(openai_error(error), 400 if error.status == 422 else error.status, headers)


def openai_error(error: Refused) -> dict[str, dict[str, str | None]]:
    """Return the body of an error in the format of the OpenAI API."""
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = _OPENAI_TYPES.get(error.status, default)
    return {"error": {"message": error.message, "type": kind, "param": error.parameter, "code": error.code}}


def install(app: FastAPI) -> None:
    """Convert exceptions of the endpoints of `app` to error responses."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return error_response(request.url.path, refused(error))

    for kind in (*_EXPECTED, RequestValidationError, HTTPException, RuntimeError, Exception):
        app.add_exception_handler(kind, handle)
