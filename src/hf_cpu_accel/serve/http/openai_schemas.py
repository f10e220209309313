"""The text requests of the OpenAI API. Fields that are not supported are rejected, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from hf_cpu_accel.serve.http.unsupported import Neutral, field_errors, reject_unsupported
from hf_cpu_accel.serve.language.sampling import Sampling

MOST_STOPS = 16


class StreamOptions(BaseModel):
    """Options of a stream. `include_usage` adds a last chunk with the numbers of tokens."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value or []
    if (
        not isinstance(stops, list)
        or not all(isinstance(stop, str) and stop for stop in stops)
        or len(stops) > MOST_STOPS
    ):
        raise ValueError(f"expected a text, or a list of at most {MOST_STOPS} texts, none of them empty")
    return stops


class TextRequest(BaseModel):
    """The common fields of chats and completions. `top_k` is an extension of vLLM."""

    model_config = ConfigDict(strict=True, extra="forbid")

    neutral: ClassVar[Neutral] = {
        "n": (1,),
        "logprobs": (False,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "store": (False,),
    }
    # Accepted fields without an effect on the answer.
    remarks: ClassVar[frozenset[str]] = frozenset(
        {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
    )

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = []
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        reject_unsupported(body, cls.neutral)
        return {
            name: value for name, value in body.items() if name not in cls.neutral and name not in cls.remarks
        }

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k, self.seed)

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def _prompts(value: Any) -> Any:
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(one, str) or _is_ids(one) for one in value):
        return value
    raise ValueError("expected a text, a list of texts, a list of token ids, or a list of such lists")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


class CompletionRequest(TextRequest):
    """The body of `POST /v1/completions`."""

    neutral: ClassVar[Neutral] = {
        **TextRequest.neutral,
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
        "logprobs": (),
    }

    prompt: Annotated[list[Any], BeforeValidator(_prompts)]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16

    @model_validator(mode="after")
    def _one_stream(self) -> CompletionRequest:
        if self.stream and len(self.prompt) > 1:
            message = f"stream=True is not supported with {len(self.prompt)} prompts; pass one prompt"
            raise field_errors({"stream": message}, vars(self))
        return self
