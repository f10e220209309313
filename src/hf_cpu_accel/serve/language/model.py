"""One language model in service: its engine, its tokenizer, and what its chat template can do."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal

from hf_cpu_accel.serve.engine import Engine, Generation
from hf_cpu_accel.serve.language.grammar import GrammarMask, Grammars
from hf_cpu_accel.serve.language.parser import CallParser, Parser, Piece, parser
from hf_cpu_accel.serve.language.sampling import Sampling, processors
from hf_cpu_accel.serve.language.stream import Streams
from hf_cpu_accel.serve.language.text import Prompt, TextStream
from hf_cpu_accel.serve.limits import BadInput, TooLong

Wants = Literal["anything", "JSON", "call"]
_NEW_TOKENS = 1024  # where a chat does not say


class LanguageModel:
    """
    Args:
        name: what clients call it.
        model: a causal language model of transformers, accelerated.
        tokenizer: its tokenizer.
        rows, waiting: of `Engine`.
        on_first: is told the seconds to the first token of each answer.
        engine: further options of `Engine`.
    """

    capabilities = ("generate",)

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        *,
        rows: int = 8,
        waiting: int = 64,
        on_first: Callable[[float], object] | None = None,
        **engine: Any,
    ) -> None:
        self.name, self.model, self.tokenizer = name, model, tokenizer
        self.engine = Engine(model, rows=rows, waiting=waiting, **engine)
        self._streams = Streams(rows + waiting, on_first)
        self.ends = frozenset(_ids(model.generation_config.eos_token_id) + _ids(tokenizer.eos_token_id))
        self.grammars = Grammars(tokenizer, self.ends)

    @property
    def waiting(self) -> int:
        return self.engine.metrics.waiting

    def prompt(self, text: str | list[int]) -> Prompt:
        """What `/v1/completions` goes on with: a text, with the special tokens that the tokenizer puts before it, or ids.

        Raises:
            BadInput: there are none, or an id is not in the vocabulary.
        """
        ids = text if isinstance(text, list) else self.tokenizer(text)["input_ids"]
        vocabulary = self.model.config.get_text_config().vocab_size
        if not ids:
            raise BadInput("the prompt has no tokens")
        if not all(0 <= token < vocabulary for token in ids):
            raise BadInput(f"token ids must be from 0 to {vocabulary - 1}")
        return Prompt(list(ids))

    def chat_prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        hints: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """
        Args:
            messages: as transformers' `apply_chat_template` takes them.
            variables: what else the template is given, and has to have a place for.
            hints: what it is given in case that it has.

        Raises:
            BadInput: the model has no chat template, or one that has no place for tools or a variable, or refuses the messages.
        """
        from jinja2 import TemplateError

        if tools:
            self._check_template("tools", "tools")
        for name in variables or ():
            self._check_template(name, name)
        self._check_template("messages", "chats")
        try:
            ids = self.tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                add_generation_prompt=True,
                return_dict=False,
                **{**(hints or {}), **(variables or {})},
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise BadInput(f"the chat template refuses these messages: {error}") from error
        return Prompt(list(ids), tools, is_chat=True)

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int | None,
        sampling: Sampling,
        mask: GrammarMask | None = None,
    ) -> Generation:
        """Ask the engine; None takes 1,024 tokens, or what the model has positions for. mask: of `grammars`.

        Raises:
            TooLong: the model has not so many positions.
            Busy, Stopping: as `Engine.submit`.
        """
        room = self.engine.max_length - len(prompt.ids)
        if max_new_tokens is None:
            max_new_tokens = max(1, min(room, _NEW_TOKENS))
        if max_new_tokens > room:
            raise TooLong(
                f"the prompt has {len(prompt.ids)} tokens and {max_new_tokens} are asked for: together at most "
                f"{self.engine.max_length}"
            )
        config = sampling.config(self.model.generation_config)
        return self.engine.submit(
            prompt.ids,
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(self.ends),
            logits_processor=processors(config, mask),
            do_sample=bool(config.do_sample),
            seed=sampling.seed,
        )

    def text(self, prompt: Prompt, stop: Sequence[str] = (), wants: Wants = "anything") -> TextStream:
        """What makes text of the tokens that follow `prompt`, and calls of tools; `wants` is what a grammar forces it to be."""
        return TextStream(self.tokenizer, self.ends, prompt, stop, self._parser(prompt, wants))

    def pieces(self, generation: Generation, text: TextStream) -> AsyncIterator[Piece]:
        """See `Streams.pieces`."""
        return self._streams.pieces(generation, text)

    def close(self, timeout: float | None = None) -> bool:
        """Finish what was begun; what still runs after `timeout` seconds is cancelled."""
        self.engine.close(timeout)
        self._streams.close()
        return True

    def _parser(self, prompt: Prompt, wants: Wants) -> Parser | None:
        if not prompt.is_chat or wants == "JSON":
            return None
        if wants == "call":
            return CallParser()
        return parser(self.model, self.tokenizer, prompt.ids, prompt.tools)

    def _check_template(self, variable: str, what: str) -> None:
        template = self.tokenizer.chat_template
        source = "\n".join(template.values()) if isinstance(template, dict) else template
        if not source:
            raise BadInput(f"the model {self.name!r} has no chat template: use /v1/completions")
        if not re.search(rf"\b{re.escape(variable)}\b", source):
            raise BadInput(f"the chat template of {self.name!r} has no place for {what}")


def _ids(value: int | Sequence[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
