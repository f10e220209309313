"""The chat request of the OpenAI API: messages, tools and the format of the answer."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hf_cpu_accel.serve.http.openai_schemas import TextRequest
from hf_cpu_accel.serve.http.unsupported import Neutral, field_errors


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Message(_Strict):
    """One message of a chat. `content` is a text, or a list of text parts."""

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
    """A function of a tool. `parameters` is a JSON schema. `strict` is enforced only if a call is forced."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    """An entry of `tools`."""

    type: Literal["function"]
    function: Function


class FunctionName(_Strict):
    """The function of a `NamedTool`."""

    name: str


class NamedTool(_Strict):
    """A `tool_choice` that names the tool to call."""

    type: Literal["function"]
    function: FunctionName


class NamedSchema(_Strict):
    """The `json_schema` of a response format. The schema is enforced for any value of `strict`."""

    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = {"type": "object"}
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Strict):
    """The format of an answer: a text, any JSON object, or JSON with a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            problem = "is not accepted" if self.json_schema is not None else "is missing"
            raise ValueError(
                f"type={self.type!r}: json_schema {problem}; pass json_schema with type='json_schema', and only with it"
            )
        return self

    @property
    def schema_(self) -> dict[str, Any] | None:
        """Return the JSON schema of the answer; None for any text."""
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
                f"tool_choice={self._choice!r} needs a tool that is not in tools; accepted: {self._choices}"
            )
            raise field_errors({"tool_choice": message}, vars(self))
        if self.answer_schema is not None and self.prompt_tools:
            message = (
                "response_format is not supported with tools; leave out tools, or pass tool_choice='none'"
            )
            raise field_errors({"response_format": message}, vars(self))
        return self

    @property
    def _choice(self) -> str:
        """Return the value of `tool_choice` for messages."""
        return (
            self.tool_choice.function.name
            if isinstance(self.tool_choice, NamedTool)
            else str(self.tool_choice)
        )

    @property
    def _choices(self) -> str:
        """Return the values of `tool_choice` that these tools allow, for messages."""
        names = [tool.function.name for tool in self.tools or []]
        return ", ".join(map(repr, ["auto", "none", *(["required", *names] if names else [])]))

    @property
    def must_call(self) -> bool:
        """Return whether the answer must be a tool call."""
        return self.tool_choice not in (None, "auto", "none")

    @property
    def prompt_tools(self) -> list[dict[str, Any]]:
        """Return the tools for the prompt."""
        tools = [] if self.tool_choice == "none" else self.tools or []
        return [tool.model_dump(exclude_none=True) for tool in tools]

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """Return the tools that the model may call."""
        name = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        return [tool for tool in self.prompt_tools if name in (None, tool["function"]["name"])]

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """Return the JSON schema of the answer; None for any text."""
        return None if self.response_format is None else self.response_format.schema_

    @property
    def variables(self) -> dict[str, Any]:
        """Return the variables that the chat template must use."""
        result = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            result["reasoning_effort"] = self.reasoning_effort
        return result

    @property
    def hints(self) -> dict[str, Any]:
        """Return the variables that the chat template may use. They are enforced in any case."""
        if self.response_format is None or self.answer_schema is None:
            return {}
        return {"response_format": self.response_format.model_dump(by_alias=True, exclude_none=True)}
