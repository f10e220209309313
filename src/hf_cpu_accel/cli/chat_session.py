"""The conversation of `hf-cpu-accel chat`: a model, its tokenizer and the messages so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    TextStreamer,
)

from hf_cpu_accel.api import accelerate_for_cpu, explain
from hf_cpu_accel.cli import random_models
from hf_cpu_accel.cli.bench.generation_workload import auto_class, load
from hf_cpu_accel.cli.bench.workload import source_title
from hf_cpu_accel.cli.loading import blocks_of
from hf_cpu_accel.config import CPUAccelConfig
from hf_cpu_accel.frontends.gguf import located
from hf_cpu_accel.measure.generation import TokenClock


@dataclass(frozen=True)
class Answer:
    """An answer of the model, with its speed.

    Attributes:
        text: the answer.
        tokens: number of generated tokens.
        first: seconds to the first token; None without a token.
        rate: tokens/s after the first token; None with fewer than two tokens.
        stopped: True if Ctrl-C ended the answer.
    """

    text: str
    tokens: int
    first: float | None
    rate: float | None
    stopped: bool


class ChatSession:
    """One conversation. A model whose tokenizer has no chat template continues each text separately."""

    def __init__(
        self, title: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, new: int
    ) -> None:
        self.title = title
        self.dtype = explain(model).dtype
        self.has_template = bool(tokenizer.chat_template)
        self._model, self._tokenizer, self._new = model, tokenizer, new
        self._messages: list[dict[str, str]] = []

    def reset(self) -> None:
        """Clear the conversation."""
        self._messages = []

    def answer(self, text: str, write: Callable[[str], None]) -> Answer:
        """Generate an answer with the generation settings of the model.

        Ctrl-C ends the answer. The text so far becomes the answer, and the session continues.

        Args:
            text: the message of the user.
            write: called with each new piece of the answer.
        """
        self._messages.append({"role": "user", "content": text})
        streamer = _Streamer(self._tokenizer, write)
        generate: Any = self._model.generate
        stopped = False
        start = time.perf_counter()
        try:
            with torch.inference_mode():
                generate(
                    **self._inputs(text),
                    max_new_tokens=self._new,
                    streamer=streamer,
                    pad_token_id=self._padding(),
                )
        except KeyboardInterrupt:
            stopped = True
            streamer.end()  # writes the text that waits for the end of a word
        self._messages.append({"role": "assistant", "content": streamer.text})
        times = streamer.clock.times
        rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None
        return Answer(streamer.text, len(times), times[0] - start if times else None, rate, stopped)

    def _inputs(self, text: str) -> Mapping[str, Tensor]:
        """Return input_ids and attention_mask, int64 [1, tokens]; drop the oldest exchanges if they do not fit."""
        if not self.has_template:
            return _tensors(self._tokenizer(text, return_tensors="pt"))
        config = self._model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        while True:
            encoded: Any = self._tokenizer.apply_chat_template(
                self._messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            inputs = _tensors(encoded)
            fits = limit is None or inputs["input_ids"].shape[1] + self._new <= limit
            if fits or len(self._messages) < 3:
                return inputs
            del self._messages[:2]

    def _padding(self) -> int | None:
        pad = self._tokenizer.pad_token_id
        return self._tokenizer.eos_token_id if pad is None else pad


class _Streamer(TextStreamer):
    """Pass on new text, and record the time of each token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.clock = TokenClock()
        self.text = ""
        self._write = write

    def put(self, value: Tensor) -> None:
        self.clock.put(value)
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        self._write(text)


def open_session(
    model: str | None, random_config: str | None, *, dtype: str, new: int, threads: int | None
) -> ChatSession:
    """Load and accelerate a model.

    Args:
        model: model id, local folder or GGUF file, or None.
        random_config: name of an architecture with random weights, or None. Exactly one of the two is not None.
        dtype: dtype of the packed weights, as for `accelerate_for_cpu`.
        new: maximum number of tokens in an answer.
        threads: number of threads, or None to choose for the machine.

    Raises:
        ValueError: wrong arguments, or a model without a tokenizer.
        OSError: no such model.
    """
    title = source_title(model, random_config)
    CPUAccelConfig(dtype=dtype)  # reject an unknown dtype before loading the model
    if random_config is not None:
        config = random_models.config(random_config)
        tokenizer: PreTrainedTokenizerBase = _byte_tokenizer(config)
        loaded = random_models.build(random_config, auto_class(config, random_config), dtype=torch.bfloat16)
    else:
        assert model is not None
        blocks = blocks_of(model, "AutoModelForCausalLM")
        loaded = load(model) if blocks is None else blocks()
        tokenizer = _tokenizer(model)
    # The model is never restored, so the original weights are dropped.
    accelerate_for_cpu(loaded, dtype=dtype, threads=threads, originals="drop")
    return ChatSession(title, loaded, tokenizer, new)


def _tensors(encoded: Any) -> dict[str, Tensor]:
    # Some tokenizers add token types, which decoders reject.
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def _tokenizer(model: str) -> PreTrainedTokenizerBase:
    try:
        name, options = located(model)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{model} has no tokenizer that transformers can load ({error}); save one beside the weights with "
            "tokenizer.save_pretrained(folder)"
        ) from error
    return tokenizer


def _byte_tokenizer(config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """Return a tokenizer for random weights: one token per byte; tokens above the bytes are decoded to their number."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)}
    vocabulary |= {
        f"<{number}>": number for number in range(len(alphabet), config.get_text_config().vocab_size)
    }
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only)
