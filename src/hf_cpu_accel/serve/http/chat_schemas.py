"""OpenAI's request for a chat, checked: its messages, its tools, and what the answer has to be."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hf_cpu_accel.serve.http.openai_schemas import TextRequest
from hf_cpu_accel.serve.http.unsupported import Neutral, field_errors


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Message(_Strict):
    """One message of a chat. content: a text, or parts of which all are texts."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _only_text(self) -> Message:
        for part in self.content if isinstance(self.content, list) else ():
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(
                    f"content parts of type {part.get('type')!r} are not supported; accepted: 'text'"
                )
        return self


class Function(_Strict):
    """A tool of a chat; parameters: a JSON schema. `strict` holds where a call is forced, and is a wish elsewhere."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    """One of `tools`."""

    type: Literal["function"]
    function: Function


class FunctionName(_Strict):
    """See `NamedTool`."""

    name: str


class NamedTool(_Strict):
    """`tool_choice` that names the tool to be called."""

    type: Literal["function"]
    function: FunctionName


class NamedSchema(_Strict):
    """`json_schema` of a response format. `strict` is what it is in any case."""

    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = {"type": "object"}
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Strict):
    """What an answer has to be: a text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError(f"type={self.type!r}: json_schema is for the type 'json_schema', which needs it")
        return self

    @property
    def schema_(self) -> dict[str, Any] | None:
        """None: anything goes."""
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema.schema_


class ChatRequest(TextRequest):
    """The body of `POST /v1/chat/completions`."""

    neutral: ClassVar[Neutral] = {
        **TextRequest.neutral,
        "top_logprobs": (0,),
        "modalities": (["text"],),
        "parallel_tool_calls": (True,),
        **dict.fromkeys(
            ("audio", "prediction", "functions", "function_call", "web_search_options", "verbosity"), ()
        ),
    }

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> ChatRequest:
        if self.must_call and not self.callable_tools:
            message = (
                f"tool_choice={self._choice!r}: there is no such tool in tools; accepted: {self._choices}"
            )
            raise field_errors({"tool_choice": message}, vars(self))
        if self.answer_schema is not None and self.given_tools:
            message = "response_format with tools is not supported; accepted: tool_choice='none'"
            raise field_errors({"response_format": message}, vars(self))
        return self

    @property
    def _choice(self) -> str:
        return (
            self.tool_choice.function.name
            if isinstance(self.tool_choice, NamedTool)
            else str(self.tool_choice)
        )

    @property
    def _choices(self) -> str:
        """The values of `tool_choice` that these tools allow."""
        names = [tool.function.name for tool in self.tools or []]
        return ", ".join(map(repr, ["auto", "none", *(["required", *names] if names else [])]))

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        return self.tool_choice not in (None, "auto", "none")

    @property
    def given_tools(self) -> list[dict[str, Any]]:
        """Those that the model is told of."""
        tools = [] if self.tool_choice == "none" else self.tools or []
        return [tool.model_dump(exclude_none=True) for tool in tools]

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """Those that it may call."""
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        return [tool for tool in self.given_tools if named in (None, tool["function"]["name"])]

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """Of which the answer has to be JSON; None: it need not."""
        return None if self.response_format is None else self.response_format.schema_

    @property
    def variables(self) -> dict[str, Any]:
        """What the chat template has to have a place for."""
        found = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            found["reasoning_effort"] = self.reasoning_effort
        return found

    @property
    def hints(self) -> dict[str, Any]:
        """What is enforced in any case, and said to the model where the template has a place for it."""
        if self.response_format is None or self.answer_schema is None:
            return {}
        return {"response_format": self.response_format.model_dump(by_alias=True, exclude_none=True)}
