"""Beam search with little work between two calls of the model; beam_state.py holds the beams."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from packaging.version import parse
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateBeamEncoderDecoderOutput

from hf_cpu_accel.generate.beam_state import Beams
from hf_cpu_accel.generate.coverage import BEAM_MODES
from hf_cpu_accel.generate.decode import NotCovered, Recorded
from hf_cpu_accel.generate.inputs import CACHE, StepInputs, prefill
from hf_cpu_accel.generate.processors import in_place
from hf_cpu_accel.generate.replay.steps import DecodeSteps
from hf_cpu_accel.generate.topk import largest

# Whether transformers orders drawn candidates by score; before 5.24 they stayed in the order of the draws.
_BEST_FIRST = parse(transformers.__version__) >= parse("5.24.0.dev0")


def beam_search(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    mask_length: int | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateBeamDecoderOnlyOutput | GenerateBeamEncoderDecoderOutput:
    """Run beam search with or without sampling, as a `custom_generate` of `GenerationMixin.generate`, like `decode`.

    Args:
        input_ids: int64 [batch * beams, prompt length], of the decoder.
        mask_length: columns of the attention mask that `generate` got or created, even if it does not pass the mask on.

    Returns:
        int64 [batch * num_return_sequences, prompt length + new tokens], or the output object if `return_dict_in_generate`.
    """
    if generation_config.get_generation_mode() not in BEAM_MODES or generation_config.low_memory:
        raise NotCovered
    recorded = Recorded(generation_config)
    beams = Beams(input_ids, generation_config)
    process = in_place(logits_processor)

    outputs, model_inputs = prefill(model, input_ids, generation_config, model_kwargs, mask_length)
    step_inputs = StepInputs(model, model_inputs, model_kwargs, outputs, input_ids.shape[1])
    to_come = generation_config.max_length - input_ids.shape[1]
    step = DecodeSteps(model, step_inputs.cache, input_ids.shape[1] + 1, to_come)
    ids = input_ids
    while True:
        logits = outputs.logits[:, -1].to(dtype=torch.float32, device=input_ids.device)
        scores = process(ids, nn.functional.log_softmax(logits, dim=-1))  # a new tensor
        if recorded.wanted:
            recorded.add(scores.clone(), logits.clone())
        chosen, continued = _continuations(scores, beams, sample=generation_config.do_sample)
        extended = beams.extend(continued, scores.shape[-1])
        ends: Any = stopping_criteria(extended, recorded.scores)
        origins = beams.choose(chosen, ends)
        step_inputs.cache.reorder_cache(origins)
        if not beams.goes_on:
            break
        ids = beams.tokens()
        del outputs, logits, scores
        outputs = step(step_inputs.after(ids))
        step_inputs.go_on_with(outputs)
    sequences, sequences_scores, beam_indices = beams.results()
    if not generation_config.return_dict_in_generate:
        return sequences
    kind: Any = (
        GenerateBeamEncoderDecoderOutput if model.config.is_encoder_decoder else GenerateBeamDecoderOnlyOutput
    )
    output: GenerateBeamDecoderOnlyOutput | GenerateBeamEncoderDecoderOutput = kind(
        sequences=sequences,
        sequences_scores=sequences_scores if generation_config.output_scores else None,
        scores=recorded.scores,
        logits=recorded.logits,
        beam_indices=beam_indices,
        **{CACHE: step_inputs.cache},
    )
    return output


def _continuations(scores: Tensor, beams: Beams, *, sample: bool) -> tuple[Tensor, Tensor]:
    """Return scores [batch, candidates] and places (beam * vocabulary + token) of the continuations to consider.

    `scores`: [batch * beams, vocabulary], of the next tokens alone.
    """
    running = torch.from_numpy(beams.scores)
    batch, count = running.shape
    accumulated = (scores.view(batch, count, -1) + running[:, :, None]).view(batch, -1)
    if not sample:
        return largest(accumulated, beams.candidates)
    places = torch.multinomial(nn.functional.softmax(accumulated, dim=-1), num_samples=beams.candidates)
    drawn = accumulated.gather(1, places)
    if _BEST_FIRST:
        drawn, order = drawn.sort(dim=-1, descending=True)
        places = places.gather(1, order)
    return drawn, places
