"""Fields of a request that ask for nothing this server does: their neutral values are accepted, all others are refused."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

Neutral = Mapping[str, tuple[Any, ...]]
"""Field: the values that ask for nothing. A field without any has to be left out; null is accepted everywhere."""

KIND = "unsupported"
"""The type of pydantic's errors for these fields: their messages name the field and its value."""


def refuse_unsupported(fields: Mapping[str, Any], neutral: Neutral) -> None:
    """Check the fields of a request that only have neutral values.

    Raises:
        ValidationError: it names each field of `neutral` with another value, that value, and what is accepted.
    """
    refused = {
        name: f"{name}={reprlib.repr(fields[name])} is not supported; {_accepted(values)}"
        for name, values in neutral.items()
        if fields.get(name) is not None and not any(_is(fields[name], value) for value in values)
    }
    if refused:
        raise field_errors(refused, fields)


def field_errors(messages: Mapping[str, str], fields: Mapping[str, Any]) -> ValidationError:
    """Return the error of a model whose fields are wrong together, at the places of these fields."""
    return ValidationError.from_exception_data(
        "request",
        [
            InitErrorDetails(
                type=PydanticCustomError(KIND, "{message}", {"message": message}),
                loc=(name,),
                input=fields.get(name),
            )
            for name, message in messages.items()
        ],
    )


def _accepted(values: tuple[Any, ...]) -> str:
    return f"accepted: {values[0]!r}" if values else "leave it out"


def _is(value: Any, neutral: Any) -> bool:
    """In Python True is 1 and False is 0; in JSON they are not."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
