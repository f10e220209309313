"""Compare recorded layers of no known form with their parts and eager: `python -m benchmarks.layers [--threads 1] [--rounds 20]`.

The three take turns in one process. The fastest rounds are printed, in milliseconds of CPU time of whole models.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.rewrite.capture.program_layer import ProgramLayer

Model = tuple[nn.Module, dict[str, Any]]


def parakeet() -> Model:
    """Half the width of Parakeet 0.6B, 4 layers, 8 seconds."""
    from transformers import ParakeetEncoder, ParakeetEncoderConfig

    config = ParakeetEncoderConfig(hidden_size=512, num_hidden_layers=4, intermediate_size=2048)
    return ParakeetEncoder(config), {"input_features": torch.randn(1, 800, config.num_mel_bins)}


def segformer() -> Model:
    """B0, 256 x 256."""
    from transformers import SegformerConfig, SegformerModel

    return SegformerModel(SegformerConfig()), {"pixel_values": torch.randn(1, 3, 256, 256)}


def qformer() -> Model:
    """InstructBLIP's, 4 layers: 32 queries and 16 tokens over an image of 257."""
    from transformers import InstructBlipQFormerConfig
    from transformers.models.instructblip.modeling_instructblip import InstructBlipQFormerModel

    model = InstructBlipQFormerModel(InstructBlipQFormerConfig(num_hidden_layers=4))
    batch = {"input_ids": torch.randint(1, 1000, (1, 16)), "query_embeds": torch.randn(1, 32, 768)}
    return model, {**batch, "encoder_hidden_states": torch.randn(1, 257, 1408)}


MODELS: dict[str, Callable[[], Model]] = {"parakeet": parakeet, "segformer": segformer, "q-former": qformer}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| Model | dtype | eager | in parts | recorded | of the parts' time | gain over eager |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for name, build in MODELS.items():
        for dtype in ("float32", "bfloat16", "int8"):
            eager, parts, recorded = (1e3 * seconds for seconds in measured(*build(), dtype, options.rounds))
            times = f"{eager:.1f} | {parts:.1f} | {recorded:.1f}"
            print(
                f"| {name} | {dtype} | {times} | {recorded / parts:.2f} | {eager / recorded:.2f} |",
                flush=True,
            )


@torch.no_grad()
def measured(model: nn.Module, batch: dict[str, Any], dtype: str, rounds: int) -> tuple[float, ...]:
    """Return the CPU seconds of a call: eager, in parts, recorded."""
    forms = [model.eval(), *(accelerate_for_cpu(copy.deepcopy(model), dtype=dtype) for _ in range(2))]
    for layer in forms[1].modules():
        if isinstance(layer, ProgramLayer):
            vars(layer)["_call"] = lambda args, kwargs: None  # no form is recorded
    fastest = [float("inf")] * len(forms)
    for turn in range(4 + rounds):
        for number, form in enumerate(forms):
            started = time.process_time()
            form(**batch)
            seconds = time.process_time() - started
            if turn >= 4:  # those before are recorded, compared and tuned
                fastest[number] = min(fastest[number], seconds)
    return tuple(fastest)


if __name__ == "__main__":
    main()
