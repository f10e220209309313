"""An embedding model in OpenVINO's int8 behind this project's own server: `benchmarks.serving.embeddings --peer openvino`.

It runs in the environment `openvino-server`. The model is all that differs: HTTP, tokenizing, batching and pooling are the same
code. It is made as sentence-transformers' OpenVINO backend makes it, with NNCF's static quantization for transformers, but called
without optimum-intel, which does not take the transformers that this project needs; that saves the rival a copy of each output.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from hf_cpu_accel.cli.demo_measure import sentences
from hf_cpu_accel.serve.encoders.encoder import Encoder, LoadedEncoder, pad
from hf_cpu_accel.serve.encoders.loading import sentence_embedding
from hf_cpu_accel.serve.encoders.tokenizing import TextTokenizer
from hf_cpu_accel.serve.http.app import Service
from hf_cpu_accel.serve.http.metrics import Metrics
from hf_cpu_accel.serve.models import Models
from hf_cpu_accel.serve.server import Server, serve

_EXAMPLES = 300  # texts that ranges are read from, as sentence-transformers has it


def quantized(bert: torch.nn.Module, tokenizer: TextTokenizer) -> Any:
    """Return OpenVINO's model in int8, for any number of rows and tokens."""
    import nncf
    import openvino

    known = sentences()
    texts = (known * (_EXAMPLES // len(known) + 1))[:_EXAMPLES]
    batches = [pad(tokenizer, [text]) for text in tokenizer.encode(texts)]
    model = openvino.convert_model(bert, example_input=batches[0])
    samples = nncf.Dataset(batches, lambda batch: {name: ids.numpy() for name, ids in batch.items()})
    return nncf.quantize(model, samples, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(batches))


def forward_of(model: Any, threads: int | None, streams: int) -> Callable[..., Any]:
    """Return a replacement of a transformers model: `forward(input_ids, attention_mask, ...)`, from any thread."""
    import openvino
    from transformers.modeling_outputs import BaseModelOutput

    options: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": str(streams)}
    options |= {} if threads is None else {"INFERENCE_NUM_THREADS": threads}
    compiled = openvino.Core().compile_model(model, "CPU", options)
    own = threading.local()

    def forward(return_dict: bool = True, **inputs: Tensor) -> BaseModelOutput:
        if not hasattr(own, "request"):
            own.request = compiled.create_infer_request()
        feeds = {name: ids.numpy() for name, ids in inputs.items()}
        result = own.request.infer(feeds, share_inputs=True, share_outputs=True)
        return BaseModelOutput(torch.from_numpy(result[0]))

    return forward


def main(
    model: str,
    threads: Annotated[
        int | None, typer.Option(help="Threads of OpenVINO [default: its own choice].")
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="Batches computed concurrently.")] = 1,
) -> None:
    """Serve MODEL."""
    from sentence_transformers import SentenceTransformer

    whole = SentenceTransformer(model, device="cpu").eval()
    bert = whole[0].auto_model
    tokenizer = TextTokenizer(whole.tokenizer, whole.max_seq_length or 512)

    bert.forward = forward_of(quantized(bert, tokenizer), threads, streams)
    metrics = Metrics()
    loaded = LoadedEncoder("openvino", tokenizer, sentence_embedding(whole), whole)
    encoder = Encoder(loaded, workers=streams, on_batch=metrics.on_batch("openvino"))
    service = Service(Models([encoder]), metrics)
    serve(Server(service, port=0, on_start=lambda url: print(f"{url} openvino", flush=True)))
    sys.exit(0)


if __name__ == "__main__":
    typer.run(main)
