"""Fields of requests that are not supported: their neutral values are accepted, all other values are rejected."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

Neutral = Mapping[str, tuple[Any, ...]]
"""{field: neutral values}. A field without neutral values must be left out. null is always accepted."""

KIND = "unsupported"
"""Type of the pydantic errors for these fields, whose messages name the field and its value."""


def reject_unsupported(fields: Mapping[str, Any], neutral: Neutral) -> None:
    """Check that the fields of `neutral` have only neutral values.

    Raises:
        ValidationError: a field has another value; the message names the field, the value and the accepted value.
    """
    messages = {
        name: f"{name}={reprlib.repr(fields[name])} is not supported; {_accepted(values)}"
        for name, values in neutral.items()
        if fields.get(name) is not None and not any(_is(fields[name], value) for value in values)
    }
    if messages:
        raise field_errors(messages, fields)


def field_errors(messages: Mapping[str, str], fields: Mapping[str, Any]) -> ValidationError:
    """Return a validation error with these messages, {field: message}, and the values of the fields."""
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
    """Return whether the values are equal in JSON, where True is not 1 and False is not 0."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
