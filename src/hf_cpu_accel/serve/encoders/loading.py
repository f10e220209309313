"""Load and accelerate embedding models and classifiers for `Encoder`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.api import accelerate_for_cpu
from hf_cpu_accel.serve.encoders.encoder import LoadedEncoder
from hf_cpu_accel.serve.encoders.tokenizing import TextTokenizer


def load_sentence_transformer(name: str, source: str, **options: Any) -> LoadedEncoder:
    """Load a model of sentence-transformers.

    Args:
        name: the name for clients.
        source: model id or folder.
        options: options of `accelerate_for_cpu`.

    Raises:
        OSError: no such model.
        ValueError: sentence-transformers is not installed, or the model does not read texts.
    """
    if find_spec("sentence_transformers") is None:
        raise ValueError(
            f"{source} is a model of sentence-transformers, which is not installed; run pip install sentence-transformers"
        )
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(source, device="cpu").eval()
    accelerate_for_cpu(model, originals="drop", **options)
    limit = model.max_seq_length or _positions(model.tokenizer, model[0])
    # Prompts that pooling excludes are not supported, because pooling would need the length of the prompt.
    includes_prompt = all(getattr(module, "include_prompt", True) for module in model)
    prompts = {key: prompt for key, prompt in model.prompts.items() if prompt} if includes_prompt else {}
    return LoadedEncoder(
        name, TextTokenizer(model.tokenizer, limit), sentence_embedding(model), model, prompts=prompts
    )


def load_embedder(name: str, source: str, **options: Any) -> LoadedEncoder:
    """Load a transformers encoder; the embedding of a text is the mean of its last hidden states.

    Args:
        name: the name for clients.
        source: model id or folder.
        options: options of `accelerate_for_cpu`.
    """
    from transformers import AutoModel

    return _load(name, source, AutoModel, _mean_of_tokens, **options)


def load_classifier(name: str, source: str, **options: Any) -> LoadedEncoder:
    """Load a transformers classifier of texts or pairs; with one label it can also rerank, like cross-encoders.

    Args:
        name: the name for clients.
        source: model id or folder.
        options: options of `accelerate_for_cpu`.
    """
    from transformers import AutoModelForSequenceClassification

    loaded = _load(name, source, AutoModelForSequenceClassification, _logits, **options)
    config = loaded.model.config
    labels = [config.id2label[number] for number in range(config.num_labels)]
    multi_label = config.problem_type == "multi_label_classification"
    return LoadedEncoder(name, loaded.tokenizer, loaded.forward, loaded.model, labels, multi_label)


def _load(
    name: str,
    source: str,
    auto_class: Any,
    forward: Callable[[nn.Module], Callable[[dict[str, Tensor]], Tensor]],
    **options: Any,
) -> LoadedEncoder:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    model = auto_class.from_pretrained(source, dtype=torch.float32).eval()
    accelerate_for_cpu(model, originals="drop", **options)
    return LoadedEncoder(name, TextTokenizer(tokenizer, _positions(tokenizer, model)), forward(model), model)


def _positions(tokenizer: Any, model: Any) -> int:
    """Return the maximum number of tokens of a text. Tokenizers without a limit report a huge number."""
    config: Any = getattr(model, "config", None)
    limits = (tokenizer.model_max_length, getattr(config, "max_position_embeddings", None))
    return min((limit for limit in limits if limit and limit < 10**9), default=8192)


def sentence_embedding(model: Any) -> Callable[[dict[str, Tensor]], Tensor]:
    """Return the forward pass of a model of sentence-transformers, without the normalization at its end."""
    from sentence_transformers.sentence_transformer.modules import Normalize

    modules = list(model)
    while isinstance(modules[-1], Normalize):
        modules.pop()  # requests decide about normalization

    def forward(inputs: dict[str, Tensor]) -> Tensor:
        features: Mapping[str, Any] = inputs
        for module in modules:
            features = module(features)
        embedding: Tensor = features["sentence_embedding"]
        return embedding

    return forward


def _mean_of_tokens(model: nn.Module) -> Callable[[dict[str, Tensor]], Tensor]:
    def forward(inputs: dict[str, Tensor]) -> Tensor:
        hidden_states = model(**inputs).last_hidden_state
        mask = inputs["attention_mask"][..., None].to(hidden_states.dtype)
        mean: Tensor = (hidden_states * mask).sum(1) / mask.sum(1)
        return mean

    return forward


def _logits(model: nn.Module) -> Callable[[dict[str, Tensor]], Tensor]:
    def forward(inputs: dict[str, Tensor]) -> Tensor:
        logits: Tensor = model(**inputs).logits
        return logits

    return forward
