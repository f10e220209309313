"""The decode loop: greedy search and sampling with little work between two calls of the model.

It does the same as transformers' `GenerationMixin._sample`, in the same order and with the same random numbers, without the
cases that `coverage.py` excludes: it concatenates nothing that grows with the tokens, and if the model prepares its inputs in
the usual way, they are prepared once.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.generation.streamers import BaseStreamer

from hf_cpu_accel.generate.coverage import DECODE_MODES
from hf_cpu_accel.generate.inputs import CACHE, StepInputs, prefill
from hf_cpu_accel.generate.processors import in_place
from hf_cpu_accel.generate.replay.steps import DecodeSteps
from hf_cpu_accel.generate.speculation.request import SpeculationRequest
from hf_cpu_accel.generate.speculation.steps import SpeculativeSteps

_ROOM = 1024  # new tokens with preallocated places


class NotCovered(Exception):
    """`generate` chose a mode that was not expected when the loop was selected. Nothing has run yet."""


def decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None = None,
    mask_length: int | None = None,
    speculation: SpeculationRequest | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:
    """Run greedy search or sampling, as a `custom_generate` of `GenerationMixin.generate`.

    Args:
        input_ids: int64 [batch, prompt length], of the decoder.
        streamer: gets the tokens [batch] of each step. `generate` does not pass it to a `custom_generate`, so it is bound
            before.
        mask_length: columns of the attention mask that `generate` got or created, even if it does not pass the mask on.
        speculation: how to draft tokens, or None for one call of the model per token.
        model_kwargs: further arguments of the model.

    Returns:
        int64 [batch, prompt length + new tokens], or the output object if `return_dict_in_generate`.
    """
    if generation_config.get_generation_mode() not in DECODE_MODES:
        raise NotCovered
    recorded = Recorded(generation_config)
    choose = _sampled if generation_config.do_sample else _largest
    # Processors and recorded logits own what they get; else the logits of the model are read in place.
    copies = bool(logits_processor) or recorded.wanted
    tokens = _Tokens(input_ids, generation_config.max_length)
    finished = _Finished(stopping_criteria, generation_config, len(input_ids))
    # Recorded logits must not be those that a processor changed.
    process: Any = logits_processor if recorded.wanted else in_place(logits_processor)

    outputs, model_inputs = prefill(model, input_ids, generation_config, model_kwargs, mask_length)
    last = outputs.logits[:, -1]
    step_inputs = StepInputs(model, model_inputs, model_kwargs, outputs, tokens.length)
    del outputs  # of the prompt they may be large
    with contextlib.closing(_steps(model, step_inputs, tokens, speculation, model_kwargs)) as steps:
        while True:
            logits = last.to(dtype=torch.float32, device=input_ids.device, copy=copies)
            ids = tokens.so_far()
            scores = process(ids, logits) if copies else logits
            recorded.add(scores, logits)
            chosen = finished.padded(choose(scores))
            ids = tokens.append(chosen)
            finished.check(ids, recorded.scores)
            if streamer is not None:
                streamer.put(chosen.cpu())
            if finished.all:
                break
            del last, logits, scores
            last = steps(ids)
    if streamer is not None:
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return tokens.so_far().clone()
    return recorded.output(model, tokens.so_far().clone(), step_inputs.cache)


class _OneToken:
    """Steps of one call of the model per token."""

    def __init__(self, model: Any, inputs: StepInputs, tokens: _Tokens) -> None:
        self._inputs = inputs
        self._steps = DecodeSteps(model, inputs.cache, tokens.length + 1, tokens.to_come)

    def __call__(self, ids: Tensor) -> Tensor:
        """Return logits [batch, vocabulary] of the token after `ids`, int64 [batch, tokens], which have one more than the last
        time."""
        outputs = self._steps(self._inputs.after(ids))
        self._inputs.go_on_with(outputs)
        logits: Tensor = outputs.logits[:, -1]
        return logits

    def close(self) -> None:
        """Leave the cache as it is."""


def _steps(
    model: Any,
    inputs: StepInputs,
    tokens: _Tokens,
    speculation: SpeculationRequest | None,
    model_kwargs: dict[str, Any],
) -> _OneToken | SpeculativeSteps:
    if speculation is not None:
        mask, longest = model_kwargs.get("attention_mask"), tokens.longest
        steps = speculation.steps(model, inputs, tokens.so_far(), mask, longest)
        if steps is not None:
            return steps
    return _OneToken(model, inputs, tokens)


def _sampled(scores: Tensor) -> Tensor:
    """Draw tokens int64 [batch] from logits [batch, vocabulary]."""
    return torch.multinomial(nn.functional.softmax(scores, dim=-1), num_samples=1).squeeze(1)


def _largest(scores: Tensor) -> Tensor:
    """Return the first of the largest scores [batch, vocabulary] as int64 [batch]: NumPy is vectorized and takes 1/20 of
    torch.argmax."""
    if scores.dtype is not torch.float32:  # processors of users may change the dtype
        return torch.argmax(scores, dim=-1)
    return torch.from_numpy(scores.numpy().argmax(axis=-1))


class _Tokens:
    """The sequences so far, in one buffer."""

    def __init__(self, input_ids: Tensor, max_length: int | None) -> None:
        batch, self.length = input_ids.shape
        self.longest = max_length
        longest = self.length + _ROOM if max_length is None else max_length
        self.buffer = input_ids.new_empty(batch, max(self.length + 1, min(longest, self.length + _ROOM)))
        self.buffer[:, : self.length] = input_ids
        self.to_come = None if max_length is None else max_length - self.length

    def append(self, chosen: Tensor) -> Tensor:
        if self.length == self.buffer.shape[1]:
            self.buffer = torch.cat([self.buffer, torch.empty_like(self.buffer)], dim=1)
        self.buffer[:, self.length] = chosen
        self.length += 1
        return self.so_far()

    def so_far(self) -> Tensor:
        """Return [batch, tokens], contiguous, as processors and criteria of users expect."""
        return self.buffer[:, : self.length].contiguous()


class _Finished:
    """The sequences that have ended."""

    def __init__(
        self, criteria: StoppingCriteriaList, generation_config: GenerationConfig, batch: int
    ) -> None:
        self.criteria = criteria
        self.all = False
        self._unfinished = torch.ones(batch, dtype=torch.long)
        ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self._pad = _pad_token(generation_config) if ends and batch > 1 else None

    def padded(self, chosen: Tensor) -> Tensor:
        """Return the chosen tokens, with padding for sequences that have ended."""
        if self._pad is None:
            return chosen
        return chosen * self._unfinished + self._pad * (1 - self._unfinished)

    def check(self, ids: Tensor, scores: tuple[Tensor, ...] | None) -> None:
        self._unfinished = self._unfinished & ~self.criteria(ids, scores)
        self.all = not self._unfinished.any()


class Recorded:
    """Scores and logits of all steps, as far as the caller asked for them."""

    def __init__(self, generation_config: GenerationConfig) -> None:
        asked = generation_config.return_dict_in_generate
        self.scores: tuple[Tensor, ...] | None = () if asked and generation_config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if asked and generation_config.output_logits else None
        self.wanted = self.scores is not None or self.logits is not None

    def add(self, scores: Tensor, logits: Tensor) -> None:
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)

    def output(
        self, model: Any, sequences: Tensor, cache: Any
    ) -> GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:
        kind: Any = (
            GenerateEncoderDecoderOutput if model.config.is_encoder_decoder else GenerateDecoderOnlyOutput
        )
        output: GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput = kind(
            sequences=sequences, scores=self.scores, logits=self.logits, **{CACHE: cache}
        )
        return output


def _pad_token(generation_config: GenerationConfig) -> int | None:
    """Return the padding token, or the first end token if there is none."""
    if generation_config.pad_token_id is not None:
        return int(generation_config.pad_token_id)
    ends = generation_config.eos_token_id
    if ends is None:
        return None
    return int(ends[0] if isinstance(ends, list | tuple) else ends)
