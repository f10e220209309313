"""sentence-transformers' OpenVINO int8 model behind this project's own server: `benchmarks.serving.embeddings --peer openvino`.

It runs in a Python that has openvino, optimum-intel and nncf. The model is all that differs: HTTP, tokenising, batching and
pooling are the same code.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Annotated

import typer

from hf_cpu_accel.serve.encoders.encoder import Encoder, LoadedEncoder
from hf_cpu_accel.serve.encoders.loading import sentence_embedding
from hf_cpu_accel.serve.encoders.tokenizing import TextTokenizer
from hf_cpu_accel.serve.http.app import Service
from hf_cpu_accel.serve.http.metrics import Metrics
from hf_cpu_accel.serve.models import Models
from hf_cpu_accel.serve.server import Server, serve


def main(model: str, threads: Annotated[int | None, typer.Option()] = None) -> None:
    """Serve MODEL in int8, dynamically quantised as sentence-transformers' documentation shows it."""
    from sentence_transformers import SentenceTransformer, export_static_quantized_openvino_model

    options = {} if threads is None else {"ov_config": {"INFERENCE_NUM_THREADS": str(threads)}}
    with tempfile.TemporaryDirectory() as folder:
        whole = SentenceTransformer(model, backend="openvino", device="cpu")
        whole.save_pretrained(folder)
        export_static_quantized_openvino_model(whole, None, folder)
        file = {"file_name": "openvino_model_qint8_quantized.xml"}
        quantised = SentenceTransformer(
            folder, backend="openvino", device="cpu", model_kwargs={**file, **options}
        )
    tokenizer = TextTokenizer(quantised.tokenizer, quantised.max_seq_length or 512)
    metrics = Metrics()
    loaded = LoadedEncoder("openvino", tokenizer, sentence_embedding(quantised), quantised)
    service = Service(Models([Encoder(loaded, on_batch=metrics.on_batch("openvino"))]), metrics)
    serve(Server(service, port=0, on_start=lambda url: print(f"{url} openvino", flush=True)))
    sys.exit(0)


if __name__ == "__main__":
    typer.run(main)
