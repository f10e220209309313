"""Compare models quantized by torch's tools before and after acceleration: CPU time of one call, and cosines.

    python -m benchmarks.torch_quantized

The models are BERT-base with two layers on 128 tokens, and ResNet-50 on one image, with random weights. Rows of
PT2E need torchao.
"""

from __future__ import annotations

import copy
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch._inductor.config
import torch.ao.quantization as ao
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertModel, ResNetConfig, ResNetForImageClassification

from hf_cpu_accel import accelerate_for_cpu

_ROUNDS, _CALLS = 5, 5


def milliseconds(call: Callable[[], object]) -> float:
    """The best of a few rounds, in CPU time."""
    call()
    call()  # providers are measured
    best = float("inf")
    for _ in range(_ROUNDS):
        start = time.process_time()
        for _ in range(_CALLS):
            call()
        best = min(best, (time.process_time() - start) / _CALLS)
    return best * 1e3


def models() -> Iterator[tuple[str, nn.Module, Tensor]]:
    torch.manual_seed(0)
    yield (
        "BERT, 2 layers, 1x128",
        BertModel(BertConfig(num_hidden_layers=2)).eval(),
        torch.randint(0, 30000, (1, 128)),
    )
    yield "ResNet-50, 1x224", ResNetForImageClassification(ResNetConfig()).eval(), torch.randn(1, 3, 224, 224)


def pt2e(model: nn.Module, input: Tensor) -> nn.Module:
    """`model` by the PT2E flow of torchao, static."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(torch.export.export(model, (input,)).module(), quantizer)
    prepared(input)
    converted: nn.Module = convert_pt2e(prepared)
    return converted


def inductor(graph: nn.Module) -> Callable[..., object]:
    """Compile the graph with Inductor, the target of PT2E."""
    torch._inductor.config.freezing = True
    compiled: Callable[..., object] = torch.compile(graph, dynamic=False)
    return compiled


def quantized(model: nn.Module, input: Tensor) -> Iterator[tuple[str, nn.Module]]:
    if any(
        isinstance(module, nn.Linear) and module.in_features > 64 for module in list(model.modules())[:60]
    ):
        yield "quantize_dynamic", ao.quantize_dynamic(copy.deepcopy(model), {nn.Linear})
    if find_spec("torchao") is not None:
        yield "PT2E", pt2e(model, input)


def values(output: Any) -> Tensor:
    first = output[0] if not hasattr(output, "logits") else output.logits
    return first.flatten(1)  # type: ignore[no-any-return]


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print(
        "| model | form | float32 ms | quantized ms | Inductor ms | accelerated ms | cosine before | cosine after |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with torch.no_grad():
        for name, model, input in models():
            expected, floating = values(model(input)), milliseconds(lambda m=model, x=input: m(x))
            for form, converted in quantized(model, input):
                frozen = "-" if form != "PT2E" else f"{milliseconds(partial(inductor(converted), input)):.1f}"
                row = []
                for step in (lambda m: m, accelerate_for_cpu):
                    served = step(converted)
                    row.append((milliseconds(lambda m=served, x=input: m(x)), values(served(input))))
                cosines = [F.cosine_similarity(given, expected).min().item() for _, given in row]
                print(
                    f"| {name} | {form} | {floating:.1f} | {row[0][0]:.1f} | {frozen} | {row[1][0]:.1f} "
                    f"| {cosines[0]:.5f} | {cosines[1]:.5f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
