"""The rivals, their environments, and the systems that they are compared with at each precision."""

from __future__ import annotations

# system -> (environment, module of benchmarks.peers that runs it there)
PEERS: dict[str, tuple[str, str]] = {
    "openvino-fp32": ("openvino", "openvino"),
    "openvino-bf16": ("openvino", "openvino"),
    "openvino-int8": ("openvino", "openvino"),
    "openvino-w8dyn": ("openvino", "openvino"),
    "onnxruntime-fp32": ("onnxruntime", "onnxruntime"),
    "onnxruntime-int8": ("onnxruntime", "onnxruntime"),
    "zentorch-fp32": ("zentorch", "compiled"),
    "zentorch-bf16": ("zentorch", "compiled"),
    "torchao-int8": ("torchao", "compiled"),
    "pt2e-int8": ("torchao", "compiled"),
}

# The same for those that generate text. Whom they meet is named on the command line.
GENERATORS: dict[str, tuple[str, str]] = {
    "llamacpp-bf16": ("llamacpp", "llamacpp"),
    "llamacpp-q8_0": ("llamacpp", "llamacpp"),
    "llamacpp-q4_0": ("llamacpp", "llamacpp"),
    "llamacpp-q4_k_m": ("llamacpp", "llamacpp"),
    "openvino-bf16": ("optimum-intel", "openvino_generation"),
    "openvino-int8": ("optimum-intel", "openvino_generation"),
    "openvino-int4": ("optimum-intel", "openvino_generation"),
}

# Servers of embeddings that `benchmarks.serving.embedders` starts -> environment.
SERVERS: dict[str, str] = {"openvino": "openvino-server", "infinity": "infinity"}

# precision -> (ours, rivals); eager float32 is the base of each.
CONTESTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "float32": (
        "ours-fp32",
        ("compile-fp32", "compile-freeze-fp32", "openvino-fp32", "onnxruntime-fp32", "zentorch-fp32"),
    ),
    "bfloat16": (
        "ours-bf16",
        ("eager-bf16", "compile-bf16", "compile-freeze-bf16", "openvino-bf16", "zentorch-bf16"),
    ),
    "int8": (
        "ours-int8",
        (
            "quantize-dynamic",
            "openvino-int8",
            "openvino-w8dyn",
            "onnxruntime-int8",
            "torchao-int8",
            "pt2e-int8",
        ),
    ),
    # Asked for by name: with ranges from the same examples, as those rivals have them.
    "int8-static": ("ours-int8-static", ("openvino-int8", "onnxruntime-int8", "pt2e-int8")),
}
USUAL = ("float32", "bfloat16", "int8")  # of these
